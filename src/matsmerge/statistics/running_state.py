"""A collection's running sums as named arrays, exactly as they are, and back.

Means would do to use them, but not to go on: they are rounded, and rows that a sum has gathered and
not yet multiplied would be multiplied at another time, which rounds differently. A collection that
goes on from these arrays gives the bytes that one without interruption gives.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.errors import StatisticsError
from matsmerge.statistics.kinds import KINDS
from matsmerge.statistics.kinds.statistic import GradientStatistic
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.parameters import Owned
from matsmerge.statistics.statistics import Count
from matsmerge.statistics.totals import Totals


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SetState(_Part):
    """What there is of one set, in the order in which it came up."""

    num_examples: Count
    sums: dict[str, dict[str, Count]]  # the number of rows, by statistic and map or parameter


class Lesson(_Part):
    """What was learnt from a batch of how the model treats batches that are padded like it."""

    batch: Annotated[Count, Field(ge=1)]  # the first such batch, counted from 1
    is_padded: list[bool]
    is_one_by_one: bool
    is_tried_out: bool


class CollectionState(_Part):
    """All of a collection but the arrays."""

    num_batches: Count
    sets: dict[str, SetState]
    leaders: dict[str, str]  # of maps that share an input
    lessons: list[Lesson]
    notes: list[str]


def describe_totals(totals: Totals) -> SetState:
    return SetState(
        num_examples=totals.num_examples,
        sums={
            kind: {name: total.num_rows for name, total in sums.items()}
            for kind, sums in totals.sums.items()
        },
    )


def arrays_of(name_of_set: str, totals: Totals) -> Iterator[tuple[str, Tensor]]:
    """Arrays named SET/STATISTIC/PART/NAME."""
    for kind, sums in totals.sums.items():
        for name, total in sums.items():
            for part, values in total.parts().items():
                yield f"{name_of_set}/{kind}/{part}/{name}", values


def read_totals(
    arrays: Checkpoint,
    of: str,
    described: SetState,
    targets: tuple[Mapping[str, LinearMap], Mapping[str, Owned]],
    dtype: torch.dtype,
) -> Totals:
    """A set's totals as they were; what does not fit the model is a `StatisticsError`.

    `targets` are the maps and the parameters of the model.
    """
    parts: dict[tuple[str, ...], dict[str, Tensor]] = defaultdict(dict)  # by statistic and name
    for full in arrays.specs:
        if full.startswith(f"{of}/") and full.count("/") >= 3:
            _, kind_name, part, name = full.split("/", 3)
            parts[kind_name, name][part] = arrays[full]
    totals = Totals(dtype, described.num_examples)
    for kind_name, rows in described.sums.items():
        kind = KINDS.get(kind_name)
        if kind is None:
            raise StatisticsError(f"there is no statistic '{kind_name}'")
        known: Mapping[str, LinearMap | Owned] = targets[isinstance(kind, GradientStatistic)]
        for name, num_rows in rows.items():
            if name not in known:
                what = "parameter" if isinstance(kind, GradientStatistic) else "map"
                raise StatisticsError(f"there is no {what} '{name}' in the model")
            try:
                total = kind.of_parts(known[name], parts[kind_name, name], num_rows, dtype)
            except StatisticsError as error:
                raise StatisticsError(f"'{name}': {error}") from error
            totals.of(kind)[name] = total
    return totals
