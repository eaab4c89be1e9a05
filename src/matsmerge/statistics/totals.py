"""Running sums of one set of statistics, and their way into arrays and back."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from matsmerge.errors import StatisticsError
from matsmerge.statistics.kinds import KINDS
from matsmerge.statistics.kinds.statistic import (
    GradientStatistic,
    InputStatistic,
    RunningSum,
    Statistic,
    Storage,
)
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.marks import Marks
from matsmerge.statistics.parameters import Owned
from matsmerge.statistics.statistics import Summed, WholeNumber


class State(BaseModel):
    """What is kept of an interrupted collection."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SetState(State):
    """What there is of one set, in the order in which it came up."""

    num_examples: WholeNumber
    marks: Marks = Marks()
    sums: dict[str, dict[str, WholeNumber]]  # the number of rows, by statistic and map or parameter


@dataclass
class Totals:
    """Everything summed up so far for one set."""

    dtype: torch.dtype
    num_examples: int = 0
    marks: Marks = field(default_factory=Marks)
    is_trial: bool = False  # only to be compared: no second moment is held as a matrix
    rank: int | None = None  # of sketches, where second moments are kept as such
    # By the statistic's name, and that of the map or parameter (or of the first of several maps
    # that share an input).
    sums: dict[str, dict[str, RunningSum]] = field(default_factory=dict)

    def of(self, kind: Statistic[Any]) -> dict[str, RunningSum]:
        """All sums of a statistic."""
        return self.sums.setdefault(kind.name, {})

    def sum_of(
        self,
        kind: Statistic[Any],
        target: LinearMap | Owned,
        device: torch.device,
        *,
        keeps_mean: bool = False,
    ) -> RunningSum:
        """The sum of a map or parameter, an empty one if there is none yet."""
        own = self.of(kind)
        if target.name not in own:
            storage = Storage(self.dtype, device, self.is_trial, keeps_mean, self.rank)
            own[target.name] = kind.new(target, storage)
        return own[target.name]

    def stored(self) -> Iterator[tuple[Statistic[Any], str, RunningSum]]:
        """All sums in the order of the table; without means over rows of which there were none."""
        for kind in KINDS.values():
            for name, total in self.of(kind).items():
                if total.num_rows or not kind.is_per_row:
                    yield kind, name, total
                else:
                    uncounted = bool(total.comparable().any())
                    assert not uncounted, f"{type(total).__name__}.add does not count num_rows"

    def summed(self, names: Mapping[str, str]) -> Iterator[Summed]:
        """What becomes statistics, with other names of parameters."""
        for kind, own_name, total in self.stored():
            name = names[own_name] if isinstance(kind, GradientStatistic) else own_name
            sums = dict(zip(kind.arrays, total.sums(), strict=False))
            yield Summed(kind, name, total.num_rows, sums)

    def state(self) -> SetState:
        """All but `parts`."""
        rows = {
            kind: {name: s.num_rows for name, s in own.items()} for kind, own in self.sums.items()
        }
        return SetState(num_examples=self.num_examples, marks=self.marks, sums=rows)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """The sums exactly as they are, as arrays named STATISTIC/PART/NAME.

        Means would do to use them, but not to go on: they are rounded, and rows that a sum has
        gathered and not yet multiplied would be multiplied at another time, which rounds
        differently. What goes on from these gives the bytes it gives without interruption.
        """
        for kind, sums in self.sums.items():
            for name, total in sums.items():
                for part, values in total.parts().items():
                    yield f"{kind}/{part}/{name}", values

    def load(
        self,
        state: SetState,
        arrays: Mapping[str, Tensor],
        maps: Mapping[str, LinearMap],
        parameters: Mapping[str, Owned],
    ) -> None:
        """Go on from a state and its parts; what does not fit the model is a `StatisticsError`."""
        parts: dict[tuple[str, str], dict[str, Tensor]] = defaultdict(dict)
        for full, values in arrays.items():
            if full.count("/") >= 2:
                kind_name, part, name = full.split("/", 2)
                parts[kind_name, name][part] = values
        self.num_examples, self.marks = state.num_examples, state.marks
        for kind_name, rows in state.sums.items():
            kind = KINDS.get(kind_name)
            if kind is None:
                raise StatisticsError(f"there is no statistic '{kind_name}'")
            is_of_parameters = isinstance(kind, GradientStatistic)
            targets: Mapping[str, Any] = parameters if is_of_parameters else maps
            for name, num_rows in rows.items():
                if name not in targets:
                    what = "parameter" if is_of_parameters else "map"
                    raise StatisticsError(f"there is no {what} '{name}' in the model")
                total = self.sum_of(kind, targets[name], torch.device("cpu"))
                try:
                    total.load(parts[kind_name, name])
                except StatisticsError as error:
                    raise StatisticsError(f"'{name}': {error}") from error
                total.num_rows = num_rows

    def differences(self, other: "Totals", precision: float) -> list[str]:
        """What is not the same but for rounding, when both are sums over the same examples."""
        found = []
        nothing = torch.zeros((), dtype=torch.float64)  # where only one of them has a sum
        for kind in KINDS.values():
            mine = {name: total.comparable().double() for name, total in self.of(kind).items()}
            yours = {name: total.comparable().double() for name, total in other.of(kind).items()}
            largest = max((float(v.norm()) for v in (*mine.values(), *yours.values())), default=0.0)
            for name in {**mine, **yours}:
                a, b = mine.get(name, nothing), yours.get(name, nothing)
                error, size = float((a - b).norm()), max(float(a.norm()), float(b.norm()))
                if error > 3 * precision**0.5 * size + precision * largest:
                    found.append(f"{kind.watches} of '{name}'")
        return found

    def share(self, leader: str, members: list[str]) -> None:
        """Give each of several maps that shared an input a sum of its own."""
        for kind in KINDS.values():
            if isinstance(kind, InputStatistic) and leader in self.of(kind):
                total = self.of(kind)[leader]
                self.of(kind).update({name: total.clone() for name in members if name != leader})
