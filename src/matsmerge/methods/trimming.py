"""Trimming task vectors to their largest entries, ranked exactly over a parameter or a model."""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from matsmerge.linalg.selection import (
    NOTHING_SEEN,
    Bracket,
    Tally,
    Values,
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
    if site.measured:
        for delta, threshold in zip(deltas, site.measured["thresholds"], strict=True):
            trim_(delta, threshold)
    return deltas


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
    ranks = [max(1, int(density * num_elements)) for density in densities]
    found: list[float | Bracket] = [0.0 if d == 1 else Bracket() for d in densities]
    if num_elements > SAMPLE_ABOVE:
        # More blocks take longer to sample, fewer leave more to collect and sort.
        num_blocks = min(math.isqrt(num_elements) // 16, num_elements // (32 * _SAMPLE_BLOCK))
        spacing = num_elements // max(16, num_blocks)
        sample = yield Pass(_magnitudes, spacing=spacing, block_elements=_SAMPLE_BLOCK)
        found = [
            bracket_quantile(blocks, density) if isinstance(f, Bracket) else f
            for f, density, *blocks in zip(found, densities, *sample, strict=True)
        ]
    while any(isinstance(f, Bracket) for f in found):
        (tallies,) = _fold_tallies((yield Pass(_Tallying(tuple(found)), fold=_fold_tallies)))
        for m, (bracket, seen) in enumerate(zip(found, tallies, strict=True)):
            if isinstance(bracket, Bracket):
                found[m] = kth_largest(ranks[m], seen, bracket)
    return [f for f in found if isinstance(f, float)]


def _magnitudes(site: Site) -> list[Values]:
    base = site.load_base()
    return [delta.abs().numpy() for _, delta in load_deltas(site, base)]


@dataclass(frozen=True)
class _Tallying:
    wanted: tuple[float | Bracket, ...]  # a number is a threshold already found

    def __call__(self, site: Site) -> list[Tally]:
        base = site.load_base()
        return [
            tally(delta.abs_().numpy(), wanted) if isinstance(wanted, Bracket) else NOTHING_SEEN
            for (_, delta), wanted in zip(load_deltas(site, base), self.wanted, strict=True)
        ]


def _fold_tallies(at_sites: list[list[Tally]]) -> list[list[Tally]]:
    return [[add_tallies(of_model) for of_model in zip(*at_sites, strict=True)]]
