"""All kinds of statistics, by the name that options and recipes have for them."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from matsmerge.statistics.kinds.fisher_block import BLOCK_FISHER
from matsmerge.statistics.kinds.fisher_diagonal import FISHER
from matsmerge.statistics.kinds.gram_matrix import GRAM
from matsmerge.statistics.kinds.kronecker_factors import KFAC
from matsmerge.statistics.kinds.paired_moments import PAIRS
from matsmerge.statistics.kinds.statistic import Statistic


def kinds_by_name(*kinds: Statistic[Any]) -> dict[str, Statistic[Any]]:
    """Kinds by name. Two with an array of the same name would overwrite each other's in files."""
    uses = Counter(array for kind in kinds for array in kind.arrays)
    twice = [array for array, num in uses.items() if num > 1]
    assert not twice, f"two kinds of statistics have an array named {', '.join(twice)}"
    return {kind.name: kind for kind in kinds}


KINDS = kinds_by_name(
    GRAM,
    KFAC,
    FISHER,
    BLOCK_FISHER,
    PAIRS,
)


def collected_for(names: Iterable[str]) -> list[Statistic[Any]]:
    """The statistics that are collected for these kinds, in the order of the table."""
    found = {part.name for name in names for part in KINDS[name].parts}
    return [kind for kind in KINDS.values() if kind.name in found]


def includes(names: Iterable[str], kind: str) -> bool:
    """Is all that a kind consists of collected for these kinds? Gram matrices are for K-FAC."""
    return set(collected_for([kind])) <= set(collected_for(names))


def arrays_of(names: Iterable[str]) -> set[str]:
    """The arrays, `inputs` of `SET/inputs/MODULE`, that these kinds are made of."""
    return {array for kind in collected_for(names) for array in kind.arrays}


def kind_of(array: str) -> Statistic[Any] | None:
    """The kind that an array belongs to."""
    return next((kind for kind in KINDS.values() if array in kind.arrays), None)
