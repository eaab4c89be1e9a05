"""Trimming task vectors to their largest entries, ranked exactly over a parameter or a model."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from matsmerge.linalg.selection import (
    NOTHING_SEEN,
    Bracket,
    FloatArray,
    Tally,
    add_tallies,
    bracket_quantile,
    kth_largest,
    tally,
)
from matsmerge.methods.method import Measuring, Pass
from matsmerge.methods.site import Site, load_deltas, stack_deltas

SAMPLE_ABOVE = 1 << 17  # fewer values than this are simply collected
_SAMPLE_BLOCK = 1 << 12


def measure_thresholds(densities: Sequence[float], num_elements: int) -> Measuring:
    """What `stack_trimmed` needs to know; nothing where all entries are kept."""
    if min(densities) == 1:
        return {}
    return {"thresholds": (yield from find_thresholds(densities, num_elements))}


def stack_trimmed(site: Site, base: Tensor) -> Tensor:  # (models, elements)
    """Task vectors with what is below their thresholds set to zero."""
    deltas = stack_deltas(site, base)
    trim_rows_(site, deltas)
    return deltas


def trim_rows_(site: Site, deltas: Tensor) -> None:
    """Zero what is smaller than each task vector's threshold, in place."""
    if site.measured:
        for delta, threshold in zip(deltas, site.measured["thresholds"], strict=True):
            trim_(delta, threshold)


def trim_(delta: Tensor, threshold: float) -> None:
    """Zero what is smaller than the threshold, in place."""
    # hardshrink zeroes |x| <= bound; what equals the threshold must stay.
    dtype = np.float32 if delta.dtype == torch.float32 else np.float64
    bound = float(np.nextafter(dtype(threshold), dtype(0)))
    torch.ops.aten.hardshrink.out(delta, bound, out=delta)


def find_thresholds(
    densities: Sequence[float], num_elements: int
) -> Generator[Pass, list[Any], list[float]]:
    """The magnitude each model's task vector must reach to be kept."""
    ranks = [[] if d == 1 else [max(1, int(d * num_elements))] for d in densities]
    found = yield from find_ranked(ranks, num_elements)
    return [of_model[0] if of_model else 0.0 for of_model in found]


def magnitudes_of_deltas(site: Site) -> Iterator[Tensor]:
    """Of each task vector the magnitudes, one at a time."""
    for _, delta in load_deltas(site, site.load_base()):
        yield delta.abs_()


def find_ranked(
    ranks: Sequence[Sequence[int]],
    num_elements: int,
    rows: Callable[[Site], Iterable[Tensor]] = magnitudes_of_deltas,
) -> Generator[Pass, list[Any], list[list[float]]]:
    """Of each row of magnitudes the values that have these ranks, 1 that of the largest.

    `rows` makes all rows at a site; none of the values is negative.
    """
    wanted = [(row, rank) for row, own in enumerate(ranks) for rank in own]
    found: list[float | Bracket] = [Bracket() for _ in wanted]
    if num_elements > SAMPLE_ABOVE and wanted:
        sample = yield sample_pass(rows, num_elements)
        blocks = list(zip(*sample, strict=True))  # of each row
        found = [bracket_quantile(blocks[row], rank / num_elements) for row, rank in wanted]
    while any(isinstance(f, Bracket) for f in found):
        looked_for = tuple((row, f) for (row, _), f in zip(wanted, found, strict=True))
        (tallies,) = _fold_tallies((yield Pass(_Tallying(rows, looked_for), fold=_fold_tallies)))
        for i, (bracket, seen) in enumerate(zip(found, tallies, strict=True)):
            if isinstance(bracket, Bracket):
                found[i] = kth_largest(wanted[i][1], seen, bracket)
    values = iter([f for f in found if isinstance(f, float)])
    return [[next(values) for _ in own] for own in ranks]


def sample_pass(rows: Callable[[Site], Iterable[Tensor]], num_elements: int) -> Pass:
    """A pass that notes rows at some sites, from which to guess where a rank is."""
    # More blocks take longer to sample, fewer leave more to collect and sort.
    num_blocks = min(math.isqrt(num_elements) // 16, num_elements // (64 * _SAMPLE_BLOCK))
    spacing = num_elements // max(16, num_blocks)
    return Pass(_Sampling(rows), spacing=spacing, block_elements=_SAMPLE_BLOCK)


@dataclass(frozen=True)
class _Sampling:
    rows: Callable[[Site], Iterable[Tensor]]

    def __call__(self, site: Site) -> list[FloatArray]:
        return [row.numpy().copy() for row in self.rows(site)]


@dataclass(frozen=True)
class _Tallying:
    rows: Callable[[Site], Iterable[Tensor]]
    wanted: tuple[tuple[int, float | Bracket], ...]  # a number has been found already

    def __call__(self, site: Site) -> list[Tally]:
        tallies = [NOTHING_SEEN] * len(self.wanted)
        for row, values in enumerate(self.rows(site)):
            for i, (of_row, bracket) in enumerate(self.wanted):
                if of_row == row and isinstance(bracket, Bracket):
                    tallies[i] = tally(values.numpy(), bracket)
        return tallies


def _fold_tallies(at_sites: list[list[Tally]]) -> list[list[Tally]]:
    return [[add_tallies(of_row) for of_row in zip(*at_sites, strict=True)]]
