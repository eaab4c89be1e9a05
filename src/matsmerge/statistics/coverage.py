"""What statistics say of themselves: which maps they cover, and what has none, and why."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from matsmerge.statistics.kinds import KINDS
from matsmerge.statistics.kinds.statistic import (
    GradientStatistic,
    InputStatistic,
    OutputStatistic,
    Statistic,
)
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.parameters import Owned
from matsmerge.statistics.statistics import Map


@dataclass(frozen=True)
class Seen:
    """What is known of a model after its batches."""

    maps: Sequence[LinearMap]
    parameters: Mapping[str, Owned]
    leaders: Mapping[str, str]  # of maps whose inputs are counted
    used: set[str]  # modules
    handled: set[str]  # parameters whose gradients are known for single examples
    having: Mapping[str, set[str]]  # by statistic, what has it in any of the sets
    keeps_means: bool  # of inputs, which joining biases needs

    def describe_maps(self, names: Mapping[str, str]) -> list[Map]:
        """The linear maps, with their parameters' names as in the checkpoint."""
        inputs = [kind for kind in KINDS.values() if isinstance(kind, InputStatistic)]
        outputs = [kind for kind in KINDS.values() if isinstance(kind, OutputStatistic)]
        return [
            Map(
                module=m.name,
                layout=m.layout,
                weight=names[self._held[m.name, "weight"]],
                bias=names.get(self._held.get((m.name, "bias"), "")),
                inputs=self.leaders.get(m.name) if any(self._having(m, inputs)) else None,
                outputs=any(self._having(m, outputs)),
            )
            for m in self.maps
        ]

    def find_lacking(self, kind: Statistic[Any]) -> Iterator[tuple[str, str]]:
        """The parameters without a kind of statistic, each with the reason."""
        is_of_parameters = isinstance(kind, GradientStatistic)
        covered = self.having[kind.name] if is_of_parameters else self._covered_by_maps(kind)
        for name, owned in self.parameters.items():
            refused = kind.refuses(owned) if is_of_parameters else None
            if refused is not None:
                yield name, refused
            elif name in covered:
                continue
            elif not any(module in self.used for module, _ in owned.owners):
                yield name, "its module is not called on this data"
            elif not is_of_parameters:
                yield name, self._why_no_map(owned, kind)
            elif name in self.handled:
                yield name, "has no part in the loss"
            else:
                yield name, "its gradient cannot be taken for single examples"

    @cached_property
    def _held(self) -> dict[tuple[str, str], str]:
        """The parameters, by module and attribute."""
        return {owner: p.name for p in self.parameters.values() for owner in p.owners}

    def _having(self, m: LinearMap, kinds: Iterable[Statistic[Any]]) -> Iterator[bool]:
        """Whether a map has each of the kinds."""
        for kind in kinds:
            name = self.leaders.get(m.name) if isinstance(kind, InputStatistic) else m.name
            yield name in self.having[kind.name]

    def _covered_by_maps(self, kind: Statistic[Any]) -> set[str]:
        attributes = ("weight", "bias") if self.keeps_means else ("weight",)
        return {
            self._held[m.name, attribute]
            for m in self.maps
            if all(self._having(m, kind.parts))
            for attribute in attributes
            if (m.name, attribute) in self._held
        }

    def _why_no_map(self, owned: Owned, kind: Statistic[Any]) -> str:
        maps = [m for m in self.maps if (m.name, "weight") in owned.owners]
        if not maps:
            return "not the weight of a linear map"
        refused = [part.refuses(m) for m in maps for part in kind.parts]
        return next(filter(None, refused), "its input is not one for each example")
