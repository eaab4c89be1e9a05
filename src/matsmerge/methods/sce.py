"""SCE: select where models differ most, calculate weights, erase minorities."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from matsmerge.linalg.selection import (
    MAX_REPEATED,
    Bracket,
    FloatArray,
    Tally,
    bracket_quantile,
    kth_largest,
)
from matsmerge.methods.method import Measuring, Method, Pass
from matsmerge.methods.site import Site, SiteTask, scratch, stack_deltas
from matsmerge.methods.trimming import SAMPLE_ABOVE, sample_pass

_SMALLEST = 1e-6  # mergekit's: task vectors smaller than this all count the same


class Sce(Method):
    """theta = theta_base + sum_m c_m d_m [agrees] / sum_m c_m [agrees].

    d_m are the task vectors where their variance over models is among the `select_topk` largest of
    those in a parameter that are not zero. c_m is w_m times the mean square of d_m; where these
    add up to less than 1e-6, as in mergekit, it is w_m. An entry agrees if it has the sign of
    sum_m d_m. Wan et al., 2024 (arXiv:2408.07990).
    """

    name = "sce"
    needs_base = True

    select_topk: float = Field(1.0, ge=0, le=1, description="share of the varying entries to merge")

    @property
    def measured_over(self) -> Literal["parameter"]:
        return "parameter"

    def measure(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:
        threshold = 0.0
        if self.select_topk < 1:
            found = yield from _find_selected(self.select_topk, num_elements)
            if found is None:
                return {"threshold": [0.0], "weights": [0.0] * len(tasks)}
            threshold, sums = found
        else:
            sums = np.sum((yield Pass(_sum_squares)), axis=0)
        means = sums / num_elements
        weights = np.array([task.weight for task in tasks])
        if means.sum() >= _SMALLEST:
            weights *= means / means.sum()
        return {"threshold": [threshold], "weights": weights.tolist()}

    def merge(self, site: Site) -> Tensor:
        base = site.load_base()
        deltas = _select(site, base, site.measured["threshold"][0])
        weights = deltas.new_tensor(site.measured["weights"])
        total = deltas.sum(0)
        sign = torch.copysign(torch.ones_like(total), total)
        agreeing = deltas.mul_(sign).relu_()
        merged = (weights @ agreeing).mul_(sign)
        divisor = weights @ agreeing.gt_(0)
        return base.add_(merged.div_(divisor.clamp_min_(_SMALLEST)))


def _select(site: Site, base: Tensor, threshold: float) -> Tensor:  # (models, elements)
    deltas = stack_deltas(site, base)
    return deltas.mul_(_variance(deltas) >= threshold) if threshold else deltas


def _variance(deltas: Tensor) -> Tensor:
    # `Tensor.var` over the first dimension takes ten times as long.
    mean = deltas.sum(0).div_(len(deltas))
    apart = torch.sub(deltas, mean, out=scratch("apart", tuple(deltas.shape), deltas))
    return apart.square_().sum(0).div_(len(deltas))


def _sum_squares(site: Site) -> list[float]:  # (models,)
    return _squares(stack_deltas(site, site.load_base()))


def _squares(deltas: Tensor) -> list[float]:  # (models,)
    """Sums of squares, in float64 and in memory that is used again."""
    row = scratch("row", (deltas.shape[1],), deltas.new_empty(0, dtype=torch.float64))
    return [float(torch.dot(row.copy_(delta), row)) for delta in deltas]


def _find_selected(
    share: float, num_elements: int
) -> Generator[Pass, list[Any], tuple[float, NDArray[np.float64]] | None]:
    """The variance that a share of the varying entries reaches, and each model's squares there.

    None if that is no entry. One pass counts what varies, and finds both, if the bracket from a
    sample holds the variance.
    """
    bracket: float | Bracket = Bracket()
    if num_elements > SAMPLE_ABOVE:
        blocks = yield sample_pass(_variances, num_elements)
        sample = [block for (block,) in blocks]
        num_varying = sum(np.count_nonzero(block) for block in sample)
        bracket = bracket_quantile(sample, share * num_varying / sum(map(len, sample)))
    while isinstance(bracket, Bracket):
        (seen,) = _add_seen((yield Pass(_Selecting(bracket), fold=_add_seen)))
        num_kept = int(seen.num_varying * share)
        if num_kept == 0:
            return None
        bracket = kth_largest(num_kept, seen.tally, bracket)
    is_kept = seen.tally.inside >= bracket
    return bracket, np.add(seen.squares_above, seen.squares[:, is_kept].sum(1))


def _variances(site: Site) -> list[Tensor]:
    return [_variance(stack_deltas(site, site.load_base()))]


@dataclass(frozen=True)
class _BracketTally:
    """What a bracket of variances saw: a tally, and beside it the squares of all models."""

    num_varying: int
    tally: Tally
    squares: NDArray[np.float64]  # (models, inside), of all entries with such a variance
    squares_above: Sequence[float]  # (models,)


@dataclass(frozen=True)
class _Selecting:
    bracket: Bracket

    def __call__(self, site: Site) -> _BracketTally:
        deltas = stack_deltas(site, site.load_base())
        variance = _variance(deltas).numpy()
        above = variance > self.bracket.high
        places = np.flatnonzero((variance >= self.bracket.low) ^ above)
        counts = np.ones(len(places), dtype=np.int64)
        inside = deltas[:, torch.from_numpy(places)].double().square_().numpy()
        sums = _squares(deltas.mul_(torch.from_numpy(above)))
        tally = Tally(int(np.count_nonzero(above)), variance[places], counts)
        return _count_equal(_BracketTally(int(np.count_nonzero(variance)), tally, inside, sums))


def _add_seen(at_sites: list[_BracketTally]) -> list[_BracketTally]:
    tally = Tally(
        sum(seen.tally.num_above for seen in at_sites),
        np.concatenate([seen.tally.inside for seen in at_sites]),
        np.concatenate([seen.tally.counts for seen in at_sites]),
    )
    squares = np.concatenate([seen.squares for seen in at_sites], axis=1)
    above = np.sum([seen.squares_above for seen in at_sites], axis=0).tolist()
    return [
        _count_equal(_BracketTally(sum(s.num_varying for s in at_sites), tally, squares, above))
    ]


def _count_equal(seen: _BracketTally) -> _BracketTally:
    """The same with entries of equal variance added up, where there are many."""
    if len(seen.tally.inside) <= MAX_REPEATED:
        return seen
    inside, where = np.unique(seen.tally.inside, return_inverse=True)
    counts = np.bincount(where, weights=seen.tally.counts).astype(np.int64)
    squares = np.array([np.bincount(where, weights=row) for row in seen.squares], dtype=np.float64)
    tally = Tally(seen.tally.num_above, cast(FloatArray, inside), counts)
    return replace(seen, tally=tally, squares=squares)
