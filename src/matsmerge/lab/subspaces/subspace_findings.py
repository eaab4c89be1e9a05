"""What is found about task parameter subspaces: spectra, overlaps, and distances of a merge."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from matsmerge.errors import RecipeError
from matsmerge.linalg.subspaces import Directions

DEFAULT_ENERGY = 0.9
# Of distances, what there are means of.
_MEASURES = (
    *("inside", "inside_at_random", "outside"),
    *("at_outputs", "inside_share", "inside_share_at_random"),
)


@dataclass(frozen=True)
class SubspaceSize:
    """How many directions a subspace has: `rank`, or as many as hold `energy` of the trace."""

    rank: int | None = None
    energy: float = DEFAULT_ENERGY

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise RecipeError(f"rank: expected at least 1 direction, found {self.rank}")
        if not 0 < self.energy <= 1:
            raise RecipeError(
                f"energy: expected a share of the trace, above 0 and at most 1, found {self.energy}"
            )

    def of(self, directions: Directions) -> int:
        """The number of directions in one layer; never more than there are."""
        if self.rank is None:
            return directions.num_holding(self.energy)
        return min(self.rank, directions.num_certain)


@dataclass(frozen=True)
class TaskSpectrum:
    """One task's second moment in one layer."""

    eigenvalues: Tensor  # (in,), the largest first; 0 where no larger than rounding
    effective_rank: float
    num_for_energy: int  # directions that hold `energy` of the trace
    rank: int  # directions of the subspace
    share: float  # of the trace that these hold


@dataclass(frozen=True)
class Distance:
    """How far the merged weight W* is from a model's W, seen from the model's task; D = W* - W.

    Relative to |W - W_base|, or to |W| without a base; NaN where that is 0 and D is not.
    """

    weight: str
    inside: float  # |D Q Qᵀ|, of the task's subspace
    outside: float  # |D (1 - Q Qᵀ)|
    at_outputs: float  # root mean square of |D z| over the task's inputs z, relative to |W z|
    inside_share_at_random: float  # of a D without preferred directions: k / in

    @property
    def inside_share(self) -> float:
        """The share of the squared distance that is inside; NaN where there is no distance."""
        total = self.inside**2 + self.outside**2
        return self.inside**2 / total if total else math.nan

    @property
    def inside_at_random(self) -> float:
        """The `inside` of a distance as large as this one without preferred directions."""
        return math.hypot(self.inside, self.outside) * math.sqrt(self.inside_share_at_random)


@dataclass(frozen=True)
class LayerView:
    """One layer, all tasks."""

    name: str  # of the first module with these inputs
    weights: tuple[str, ...]
    dim: int
    spectra: tuple[TaskSpectrum, ...]  # by task
    overlaps: tuple[tuple[float, ...], ...]  # by task and task; NaN beside an empty subspace
    at_random: tuple[tuple[float, ...], ...]  # what random directions would have
    distances: tuple[tuple[Distance, ...], ...]  # by task, then by weight

    @property
    def mean_overlap(self) -> float:
        """The mean over all pairs of tasks; NaN where there is no pair."""
        return defined_mean(_pairs(self.overlaps))

    @property
    def mean_at_random(self) -> float:
        return defined_mean(_pairs(self.at_random))


@dataclass(frozen=True)
class SubspaceView:
    """The findings in all layers."""

    tasks: tuple[str, ...]
    size: SubspaceSize
    relative_to: str | None  # "base", "model", or None where no merged weights were given
    layers: tuple[LayerView, ...]
    skipped: Mapping[str, Sequence[str]]  # why -> weights

    def overlap(self, a: int, b: int) -> float:
        """The mean over layers of two tasks' overlap."""
        return defined_mean(layer.overlaps[a][b] for layer in self.layers)

    def overlap_at_random(self, a: int, b: int) -> float:
        return defined_mean(layer.at_random[a][b] for layer in self.layers)

    def summary(self) -> dict[str, Any]:
        """The means over layers as JSON has them, with null for NaN."""
        num = range(len(self.tasks))
        compared = [] if self.relative_to is None else num
        content = {
            "tasks": [{"name": name} for name in self.tasks],
            "rank": self.size.rank,
            "energy": self.size.energy,
            "overlap": [[self.overlap(a, b) for b in num] for a in num],
            "overlap_at_random": [[self.overlap_at_random(a, b) for b in num] for a in num],
            "relative_to": self.relative_to,
            "distances": {self.tasks[i]: self.mean_distance(i) for i in compared},
        }
        return dict(without_nan(content))

    def distances(self, task: int) -> list[Distance]:
        return [found for layer in self.layers for found in layer.distances[task]]

    def mean_distance(self, task: int) -> dict[str, float]:
        """The means over weights, by what is measured."""
        found = self.distances(task)
        return {
            key: defined_mean(getattr(distance, key) for distance in found) for key in _MEASURES
        }


def defined_mean(values: Iterable[float]) -> float:
    """The mean of what is defined; NaN where nothing is."""
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


def _pairs(table: Sequence[Sequence[float]]) -> Iterable[float]:
    return (table[a][b] for a in range(len(table)) for b in range(a))


def without_nan(content: Any) -> Any:
    """JSON has no NaN; null says the same."""
    if isinstance(content, dict):
        return {key: without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [without_nan(value) for value in content]
    return None if isinstance(content, float) and math.isnan(content) else content
