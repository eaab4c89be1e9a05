"""Which maps and parameters have statistics, and why the others have none."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from matsmerge.statistics.input_watch import WatchedModel
from matsmerge.statistics.kinds import KINDS
from matsmerge.statistics.kinds.statistic import (
    GradientStatistic,
    InputStatistic,
    OutputStatistic,
    Statistic,
)
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.parameters import Owned
from matsmerge.statistics.statistics import MAIN, UNROUTED, Map
from matsmerge.statistics.watches import Watches


@dataclass(frozen=True)
class Coverage:
    """What a model's batches gave statistics of; `watches` are those of all its batches."""

    subject: WatchedModel
    watches: Collection[Watches]

    def maps(self) -> Iterator[Map]:
        """The linear maps that have any statistic, with the checkpoint's names of parameters."""
        names = self.subject.names
        for m in self.subject.maps:
            having = [kind for kind in KINDS.values() if self._has(m, kind)]
            has_inputs = any(isinstance(kind, InputStatistic) for kind in having)
            has_outputs = any(isinstance(kind, OutputStatistic) for kind in having)
            if has_inputs or has_outputs:
                yield Map(
                    module=m.name,
                    layout=m.layout,
                    weight=names[self._held[m.name, m.attribute]],
                    bias=names.get(self._held.get((m.name, "bias"), "")),
                    inputs=self.subject.shared.leaders[m.name] if has_inputs else None,
                    outputs=has_outputs,
                )

    def lacking(self, kind: Statistic[Any]) -> Iterator[tuple[str, str]]:
        """The parameters without a kind of statistic, each with the reason."""
        is_of_parameters = isinstance(kind, GradientStatistic)
        used = {module for watches in self.watches for module in watches.structure.uses}
        handled = {name for watches in self.watches for name in watches.handled}
        covered = self._having[kind.name] if is_of_parameters else self._covered_by_maps(kind)
        for name, owned in self.subject.parameters.items():
            refused = kind.refuses(owned) if is_of_parameters else None
            if refused is not None:
                yield name, refused
            elif name in covered:
                continue
            elif not owned.modules & used:
                yield name, "its module is not called on this data"
            elif not is_of_parameters:
                yield name, self._why_no_map(owned, kind)
            elif name in handled:
                yield name, "has no part in the loss"
            else:
                yield name, "its gradient cannot be taken for single examples"

    @cached_property
    def _held(self) -> dict[tuple[str, str], str]:
        """The parameters, by module and attribute."""
        return {owner: p.name for p in self.subject.parameters.values() for owner in p.owners}

    @cached_property
    def _having(self) -> dict[str, set[str]]:
        """The maps or parameters that have each statistic in any of the sets."""
        found = defaultdict(set)
        for totals in self.subject.totals.values():
            for kind, name, _ in totals.stored():
                found[kind.name].add(name)
        return found

    @cached_property
    def _routed(self) -> set[str]:
        """The maps that received something in the main set, by the first that shares the input."""
        stored = self.subject.totals[MAIN].stored()
        return {name for kind, name, _ in stored if isinstance(kind, InputStatistic)}

    def _is_unrouted(self, m: LinearMap) -> bool:
        """Is it of an expert that got no token of the main set, whatever got gradients?"""
        return m.routing is not None and self.subject.shared.leaders.get(m.name) not in self._routed

    def _has(self, m: LinearMap, kind: Statistic[Any]) -> bool:
        is_shared = isinstance(kind, InputStatistic)
        name = self.subject.shared.leaders.get(m.name) if is_shared else m.name
        return name in self._having[kind.name]

    def _covered_by_maps(self, kind: Statistic[Any]) -> set[str]:
        others = ("bias",) if self.subject.options.bias else ()
        return {
            self._held[m.name, attribute]
            for m in self.subject.maps
            if all(self._has(m, part) for part in kind.parts) and not self._is_unrouted(m)
            for attribute in (m.attribute, *others)
            if (m.name, attribute) in self._held
        }

    def _why_no_map(self, owned: Owned, kind: Statistic[Any]) -> str:
        if any(self._is_unrouted(m) for m in self.subject.maps if m.name in owned.modules):
            return UNROUTED
        maps = [m for m in self.subject.maps if (m.name, m.attribute) in owned.owners]
        if not maps:
            return "not the weight of a linear map"
        refused = [part.refuses(m) for m in maps for part in kind.parts]
        return next(filter(None, refused), "its input is not one for each example")
