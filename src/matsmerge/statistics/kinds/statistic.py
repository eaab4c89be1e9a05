"""What a statistic is: what it watches, how it is summed, stored, read back and added up.

A statistic watches one of three things: the rows that linear maps receive (`InputStatistic`), the
gradients at their outputs (`OutputStatistic`), or the gradients of single examples with respect to
parameters (`GradientStatistic`). Of each map or parameter it keeps one `Sum`.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor

from matsmerge.errors import StatisticsError
from matsmerge.statistics.gradients import MapCall
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.parameters import Owned

if TYPE_CHECKING:
    from matsmerge.statistics.statistics import Header, Map

# `wide` is never in a file: it is what `sketch` is made of.
Form = Literal["symmetric", "diagonal", "rows", "full", "sketch", "wide"]
Arrays = Mapping[str, tuple[Form, ...]]  # by name, each with the forms it may have
Shapes = Mapping[str, tuple[int, ...]]
StoredTensor = tuple[Tensor, Form]  # an array, and the form it has
Target = TypeVar("Target", LinearMap, Owned)


class RunningSum(ABC):
    """A statistic's running sum for one map or parameter."""

    num_rows: int = 0  # how many rows were added; counted by `add` where `is_per_row`

    @abstractmethod
    def add(self, rows: Tensor, keep: Tensor | None = None) -> None:  # (rows, ...)
        """Add rows, or those with the indices `keep`, which is None where there are groups.

        After `load` the sum may be on another device than the rows.
        """

    def add_calls(self, calls: Sequence[MapCall]) -> None:
        """Add the gradients of a weight that is used by these calls, an example at a time."""
        weight = calls[0].map.weight
        rows = slice(0, len(weight))
        for n in range(len(calls[0].examples.numbers)):
            gradients = torch.stack([call.gradient(n, rows) for call in calls])
            self.add(gradients.sum(0).reshape(1, *weight.shape))

    @abstractmethod
    def parts(self) -> dict[str, Tensor]:
        """The arrays that it is made of, exactly."""

    @abstractmethod
    def load(self, parts: Mapping[str, Tensor]) -> None:
        """Fill an empty sum from `parts`; what does not fit is a `StatisticsError`."""

    @abstractmethod
    def sums(self) -> list[StoredTensor]:
        """What is divided and stored, in the order of `Statistic.arrays`; the last may be missing.

        An array of the form `rows` is stored as it is.
        """

    def comparable(self) -> Tensor:
        """A tensor that is the same for sums of the same rows."""
        return self.sums()[0][0]

    def clone(self) -> Self:
        return copy.deepcopy(self)


@dataclass(frozen=True)
class Storage:
    """How a new sum is kept."""

    dtype: torch.dtype
    device: torch.device
    is_trial: bool = False  # only to be compared: no second moment is held as a matrix
    keeps_mean: bool = False  # a bias may be joined to the map, which needs the mean input
    rank: int | None = None  # of sketches, where second moments are kept as such


class Statistic(ABC, Generic[Target]):
    """A kind of statistic; has no state of its own."""

    name: ClassVar[str]  # as options have it
    arrays: ClassVar[Arrays]  # in a file: `inputs` of `SET/inputs/NAME`
    title: ClassVar[str] = ""  # over the spectra of its matrices; empty if they have none
    watches: ClassVar[str]  # what its sums are made of, in messages: "inputs", "gradients"
    includes: ClassVar[tuple["Statistic[Any]", ...]] = ()  # collected with it
    needs_loss: ClassVar[bool] = True
    is_per_row: ClassVar[bool] = False  # a mean over rows, not over examples
    is_paired: ClassVar[bool] = False  # of inputs, and of those of a model of its own
    is_diagonal: ClassVar[bool] = False  # of a second moment, in the parameter's shape
    expected_reasons: ClassVar[tuple[str, ...]] = ()  # of `refuses`; not worth telling the user

    @property
    def parts(self) -> tuple["Statistic[Any]", ...]:
        """The statistics that are collected for this one: those it includes, and itself."""
        return (*self.includes, self)

    @property
    def array(self) -> str:
        """The first of its arrays, which all that have the statistic have."""
        return next(iter(self.arrays))

    @abstractmethod
    def new(self, target: Target, storage: Storage) -> RunningSum:
        """An empty sum."""

    def add_up(self, sums: Sequence[StoredTensor]) -> StoredTensor:
        """One array's sum over all data, from its sums over parts of the data, in float64."""
        return reduce(torch.add, (values for values, _ in sums)), sums[0][1]

    @abstractmethod
    def num_values(self, target: Target, rank: int | None = None) -> int:
        """About how many numbers are stored of a target; `rank` is that of sketches."""

    def num_summed(self, target: Target, rank: int | None = None) -> int:
        """About how many numbers there are while it is summed up."""
        return self.num_values(target, rank)

    def refuses(self, target: Target) -> str | None:  # noqa: ARG002
        """Why a target cannot have this statistic; None if it can."""
        return None

    @abstractmethod
    def parameters(self, header: "Header") -> list[str]:
        """The parameters that have this statistic, by a file's header."""


class MapStatistic(Statistic[LinearMap], ABC):
    """A statistic of linear maps."""

    @abstractmethod
    def key(self, m: "Map") -> str | None:
        """What its array of a map would be called; None if the map has none."""

    def parameters(self, header: "Header") -> list[str]:
        def has(m: "Map") -> bool:
            keys = [part.key(m) for part in self.parts if isinstance(part, MapStatistic)]
            return all(any(f"{of}/{key}" in header.forms for of in header.sets) for key in keys)

        return list(dict.fromkeys(m.weight for m in header.maps if has(m)))


class InputStatistic(MapStatistic, ABC):
    """A statistic of the rows that linear maps receive; maps that receive the same share a sum.

    `add` gets real rows (rows, in), or (groups, rows, in), or indices (rows,) of an embedding; in
    the model's dtype, which may be less precise than the sum's.
    """

    watches = "inputs"
    needs_loss = False

    def key(self, m: "Map") -> str | None:
        return None if m.inputs is None else f"{self.array}/{m.inputs}"


class OutputStatistic(MapStatistic, ABC):
    """A statistic of the loss's gradients at the outputs of linear maps.

    `add` gets (rows, out), or (groups, rows, out).
    """

    watches = "output gradients"

    def key(self, m: "Map") -> str | None:
        return f"{self.array}/{m.module}" if m.outputs else None


class GradientStatistic(Statistic[Owned], ABC):
    """A statistic of the gradients of single examples, with respect to parameters.

    `add` gets (examples, d) of a vector, and (1, *shape) of any other parameter.
    """

    watches = "gradients"

    def parameters(self, header: "Header") -> list[str]:
        prefix = f"main/{self.array}/"
        return [key.removeprefix(prefix) for key in header.forms if key.startswith(prefix)]


def check_parts(parts: Mapping[str, Tensor], expected: Shapes, dtype: torch.dtype) -> None:
    """Refuse arrays of a running sum that are not of these shapes and this dtype, or not finite."""
    found = {part: tuple(values.shape) for part, values in parts.items()}
    if found != dict(expected):
        raise StatisticsError(f"expected arrays {dict(expected)}, found {found}")
    for part, values in parts.items():
        if values.dtype != dtype:
            raise StatisticsError(f"{part} is {values.dtype}, expected {dtype}")
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise StatisticsError(f"{part} holds NaN or Inf")
