"""The k-th largest of more values than fit into memory, exactly, usually in one pass.

A small sample gives a bracket that almost surely holds the wanted value. One pass then counts
what lies above the bracket and collects what lies inside. If the value is not inside after
all, the bracket is opened on that side and the pass is repeated (Floyd & Rivest's SELECT,
1975, turned into passes over a stream).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32] | NDArray[np.float64]

_NUM_DEVIATIONS = 3.0
_MIN_MARGIN = 1e-4
_MAX_NARROW_MISSES = 3
MAX_REPEATED = 1 << 16  # collected values beyond which equal ones are counted, not kept


@dataclass(frozen=True)
class Bracket:
    """A closed interval in which the wanted value is believed to lie."""

    low: float = 0.0
    high: float = math.inf
    num_misses: int = 0  # brackets before this one that did not hold it


@dataclass(frozen=True)
class Tally:
    """What a bracket saw of some values: how many lie above it, and those inside with counts."""

    num_above: int
    inside: FloatArray
    counts: NDArray[np.int64]


NOTHING_SEEN = Tally(0, np.empty(0), np.empty(0, dtype=np.int64))


def bracket_quantile(blocks: Sequence[FloatArray], fraction: float) -> Bracket:
    """A bracket for the value that a `fraction` of all values reaches or exceeds.

    `blocks` are short stretches taken at even distances. Neighbouring stretches tell how far the
    sampled fraction may be off (the usual variance estimate for systematic samples).
    """
    joined = cast(FloatArray, np.concatenate(blocks))
    num = len(joined)
    (middle,) = _at_places(joined, [min(num - 1, int((1 - fraction) * num))])
    lengths = np.array([len(block) for block in blocks])
    first = np.cumsum(lengths) - lengths
    shares = np.add.reduceat(joined >= middle, first, dtype=np.int64) / lengths
    deviation = math.sqrt(np.mean(np.diff(shares) ** 2) / 2 / len(shares))
    margin = _NUM_DEVIATIONS * deviation + _MIN_MARGIN
    low, high = math.floor((1 - fraction - margin) * num), math.ceil((1 - fraction + margin) * num)
    lowest, highest = _at_places(joined, [max(0, low), min(high, num - 1)])
    return Bracket(
        low=lowest if low > 0 else 0.0,
        high=highest if high < num else math.inf,
    )


def _at_places(values: FloatArray, places: Sequence[int]) -> list[float]:
    """The values that would be at some places if all were sorted."""
    parted = np.partition(values, places)
    return [float(parted[place]) for place in places]


def tally(values: FloatArray, bracket: Bracket) -> Tally:
    """Count and collect; `values` are magnitudes, so none is negative."""
    reaching, above = values >= bracket.low, values > bracket.high
    inside: FloatArray = values.take(np.flatnonzero(reaching ^ above))  # few: faster than a mask
    counts = np.ones(len(inside), dtype=np.int64)
    return _count_equal(Tally(int(np.count_nonzero(above)), inside, counts))


def add_tallies(tallies: Sequence[Tally]) -> Tally:
    """The tally of all their values together."""
    inside = np.concatenate([t.inside for t in tallies])
    counts = np.concatenate([t.counts for t in tallies])
    return _count_equal(Tally(sum(t.num_above for t in tallies), inside, counts))


def _count_equal(seen: Tally) -> Tally:
    """The same with equal values counted instead of kept, where there are many."""
    if len(seen.inside) <= MAX_REPEATED:
        return seen
    if seen.counts.max() == 1:  # then values need no places, which take much longer to sort
        inside, counts = np.unique(seen.inside, return_counts=True)
    else:
        inside, where = np.unique(seen.inside, return_inverse=True)
        counts = np.bincount(where, weights=seen.counts).astype(np.int64)
    return Tally(seen.num_above, cast(FloatArray, inside), counts)


def kth_largest(k: int, seen: Tally, bracket: Bracket) -> float | Bracket:
    """The k-th largest value (k from 1), or the next bracket to look in.

    That lies beside this one and is a few times as wide, so that a miss costs another pass but
    hardly more memory; only after several misses is everything on that side collected.
    """
    num_reaching = seen.num_above + int(seen.counts.sum())
    num_misses = bracket.num_misses + 1
    step = math.inf if num_misses > _MAX_NARROW_MISSES else 4 * (bracket.high - bracket.low)
    if k <= seen.num_above:
        return Bracket(bracket.high, bracket.high + step, num_misses)
    if k > num_reaching:
        if bracket.low == 0:
            return 0.0  # fewer than k are numbers at all
        return Bracket(max(0.0, bracket.low - step), bracket.low, num_misses)
    if num_reaching - seen.num_above == len(seen.inside):  # each is there once
        return _at_places(seen.inside, [num_reaching - k])[0]
    order = np.argsort(seen.inside)[::-1]
    reached = seen.num_above + np.cumsum(seen.counts[order])
    return float(seen.inside[order[np.searchsorted(reached, k)]])
