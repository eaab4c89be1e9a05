"""A collection's running sums as named arrays, exactly as they are, and back.

Means would do to use them, but not to go on: they are rounded, and rows that a sum has gathered and
not yet multiplied would be multiplied at another time, which rounds differently. A collection that
goes on from these arrays gives the bytes that one without interruption gives.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from matsmerge.errors import StatisticsError
from matsmerge.linalg.triangle import ENOUGH_ROWS, UpperSum
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.parameters import Owned
from matsmerge.statistics.statistics import Count
from matsmerge.statistics.totals import BlockSum, RowSum, TokenSum, Totals

Parts = dict[str, Tensor]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SetState(_Part):
    """What there is of one set, in the order in which it came up."""

    num_examples: Count
    inputs: dict[str, Count]  # the number of rows, by leading map
    outputs: list[str]  # maps
    squares: list[str]  # parameters
    blocks: list[str]  # parameters


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
        inputs={name: total.num_rows for name, total in totals.inputs.items()},
        outputs=list(totals.outputs),
        squares=list(totals.squares),
        blocks=list(totals.blocks),
    )


def arrays_of(name_of_set: str, totals: Totals) -> Iterator[tuple[str, Tensor]]:
    """Arrays named SET/KIND/PART/NAME."""
    for kind, sums in (
        ("inputs", totals.inputs),
        ("outputs", totals.outputs),
        ("blocks", totals.blocks),
    ):
        for name, total in sums.items():
            for part, values in total.parts().items():
                yield f"{name_of_set}/{kind}/{part}/{name}", values
    for name, values in totals.squares.items():
        yield f"{name_of_set}/squares/sum/{name}", values


class StateReader:
    """Makes totals of arrays; what does not fit the model is a `StatisticsError`."""

    def __init__(
        self,
        names: Mapping[str, object],
        read: Callable[[str], Tensor],
        maps: Mapping[str, LinearMap],
        parameters: Mapping[str, Owned],
    ) -> None:
        self._parts: dict[tuple[str, ...], list[str]] = {}  # by set, kind and name
        for full in names:
            if full.count("/") >= 3:
                of, kind, part, name = full.split("/", 3)
                self._parts.setdefault((of, kind, name), []).append(part)
        self._read = read
        self._maps = maps
        self._parameters = parameters

    def totals(self, of: str, described: SetState, dtype: torch.dtype) -> Totals:
        """A set's totals as they were."""
        totals = Totals(dtype, described.num_examples)
        for name, num_rows in described.inputs.items():
            m = self._map(name)
            parts = self._load(of, "inputs", name)
            if m.layout == "embedding":
                _check(parts, name, {"counts": (m.num_inputs,)}, torch.int64)
                totals.inputs[name] = TokenSum(parts["counts"], num_rows)
            else:
                _check_sum(parts, name, m.num_groups, m.num_inputs, dtype)
                totals.inputs[name] = RowSum(UpperSum.of_parts(parts), num_rows)
        for name in described.outputs:
            m = self._map(name)
            parts = self._load(of, "outputs", name)
            _check_sum(parts, name, m.num_groups, m.num_outputs, dtype)
            totals.outputs[name] = UpperSum.of_parts(parts)
        for name in described.squares:
            parts = self._load(of, "squares", name)
            shape = tuple(self._parameter(name).parameter.shape)
            _check(parts, name, {"sum": shape}, dtype)
            totals.squares[name] = parts["sum"]
        for name in described.blocks:
            parts = self._load(of, "blocks", name)
            dim = self._parameter(name).parameter.numel()
            if "gradients" in parts:
                num = parts["gradients"].shape[0] if parts["gradients"].ndim else 0
                _check(parts, name, {"gradients": (num, dim)}, dtype)
            else:
                _check_sum(parts, name, 1, dim, dtype)
            totals.blocks[name] = BlockSum.of_parts(dim, parts)
        return totals

    def _map(self, name: str) -> LinearMap:
        if name not in self._maps:
            raise StatisticsError(f"there is no map '{name}' in the model")
        return self._maps[name]

    def _parameter(self, name: str) -> Owned:
        if name not in self._parameters:
            raise StatisticsError(f"there is no parameter '{name}' in the model")
        return self._parameters[name]

    def _load(self, of: str, kind: str, name: str) -> Parts:
        parts = self._parts.get((of, kind, name), [])
        return {part: self._read(f"{of}/{kind}/{part}/{name}") for part in parts}


def _check_sum(parts: Parts, name: str, num_groups: int, dim: int, dtype: torch.dtype) -> None:
    groups = (num_groups,) if num_groups > 1 else ()
    expected: dict[str, tuple[int, ...]] = {"upper": (*groups, dim * (dim + 1) // 2)}
    if "first" in parts:
        expected["first"] = (*groups, dim)
    if "rows" in parts:
        num_rows = parts["rows"].shape[0] if parts["rows"].ndim else 0
        expected["rows"] = (min(num_rows, dim, ENOUGH_ROWS), dim)
    _check(parts, name, expected, dtype)


def _check(
    parts: Parts, name: str, expected: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    found = {part: tuple(values.shape) for part, values in parts.items()}
    if found != dict(expected):
        raise StatisticsError(f"'{name}': expected arrays {dict(expected)}, found {found}")
    for part, values in parts.items():
        if values.dtype != dtype:
            raise StatisticsError(f"'{name}': {part} is {values.dtype}, expected {dtype}")
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise StatisticsError(f"'{name}': {part} holds NaN or Inf")
