"""Stacks: which layers of which models become the layers of the result."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

BASE = "base"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Patterns = Annotated[
    list[str],
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]


def _in_order(found: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= found[0] < found[1]:
        raise ValueError(
            f"the layers {list(found)} are none: expected [FIRST, LAST + 1], counted from 0"
        )
    return found


# Layers from the first number to before the second.
LayerRange = Annotated[tuple[int, int], AfterValidator(_in_order)]


class OtherBase(BaseModel, extra="forbid", frozen=True):
    """A base for some layers alone."""

    model: str = Field(description="the name of one of the models")
    layers: LayerRange


# The model and its range, for each range of the result.
Layers = list[dict[str, LayerRange | OtherBase]]


class Stack(BaseModel, extra="forbid", frozen=True):
    """The layers of the result from the first to the last, as ranges of layers of the models.

    The models of one range are merged with each other. Parameters before all layers are those of
    the models of the first range, parameters after all layers those of the last.
    """

    match: Patterns = Field(
        default_factory=lambda: ["*"],
        min_length=1,
        description="patterns of the parameters of this stack, in models that have several",
    )
    layers: Layers = Field(
        min_length=1,
        description="{A: [0, 8]}: the layers 0 to 7 of the model A; {A: [0, 8], B: [4, 12]}: "
        "merged with the layers 4 to 11 of B; base: those of the base, by default the same",
    )

    @model_validator(mode="after")
    def _fits(self) -> "Stack":
        problems = []
        for i, ranges in enumerate(self.layers):
            where = f"layers.{i}"
            if not ranges.keys() - {BASE}:
                problems.append(f"{where}: names no model; give it one, as in {{A: [0, 8]}}")
            for name, given in ranges.items():
                if isinstance(given, OtherBase) and name != BASE:
                    problems.append(f"{where}.{name}: expected [FIRST, LAST + 1]")
            sizes = {name: stop - start for name, (start, stop) in _ranges(ranges)}
            if len(set(sizes.values())) > 1:
                found = ", ".join(f"{num} of {name}" for name, num in sizes.items())
                problems.append(f"{where}: merges different numbers of layers: {found}")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def num_layers(self) -> int:
        return sum(len(range(*self.span(i))) for i in range(len(self.layers)))

    def span(self, index: int) -> tuple[int, int]:
        """The layers of the result that the range of an index becomes."""
        lengths = [next(b - a for _, (a, b) in _ranges(ranges)) for ranges in self.layers]
        return sum(lengths[:index]), sum(lengths[: index + 1])

    def models_at(self, index: int) -> tuple[str, ...]:
        """The models whose layers are merged in the range of an index."""
        return tuple(name for name in self.layers[index] if name != BASE)

    def starts_at(self, index: int) -> dict[str, int]:
        """The first layer of each model in the range of an index."""
        return {n: a for n, (a, _) in _ranges(self.layers[index]) if n != BASE}

    def base_at(self, index: int) -> tuple[str, int] | None:
        """Whose layers are the base's, and the first; None if that is not to be told."""
        given = self.layers[index].get(BASE)
        if isinstance(given, OtherBase):
            return given.model, given.layers[0]
        starts = set(self.starts_at(index).values()) if given is None else {given[0]}
        return (BASE, starts.pop()) if len(starts) == 1 else None

    @property
    def names(self) -> set[str]:
        """All models that it names."""
        others = [r[BASE] for r in self.layers if BASE in r]
        bases = {base.model for base in others if isinstance(base, OtherBase)}
        return {n for ranges in self.layers for n in ranges if n != BASE} | bases


def _ranges(
    ranges: Mapping[str, tuple[int, int] | OtherBase],
) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, given in ranges.items():
        yield name, given.layers if isinstance(given, OtherBase) else given


def as_stacks(value: Any) -> Any:
    """One stack may be written as its layers alone, without saying which parameters are its."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if is_list and value and not any(isinstance(v, Mapping) and "layers" in v for v in value):
        return [{"layers": value}]
    return value
