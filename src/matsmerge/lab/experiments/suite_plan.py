"""What a suite asks for: the steps to do, and their outcomes as results."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from matsmerge.lab.experiments.step import Step, with_needs
from matsmerge.lab.experiments.store import Store
from matsmerge.lab.experiments.studies.study import Asked
from matsmerge.lab.experiments.suite import Suite
from matsmerge.lab.experiments.suite_results import VariantResults
from matsmerge.lab.experiments.suite_setup import Local, Setup


@dataclass(frozen=True)
class SuitePlan:
    """All studies of a suite, for all its variants and seeds."""

    suite: Suite
    local: Local = field(default_factory=Local)

    @cached_property
    def _asked(self) -> list[tuple[str, str, Asked]]:
        """Variants, studies, and what the studies ask for."""
        found = []
        for title, study in self.suite.studies.asked().items():
            for name, variant in self.suite.variants.items():
                seeds = variant.seeds or self.suite.seeds
                setups = [Setup(self.suite, name, seed, self.local) for seed in seeds]
                chosen = [setup for setup in setups if study.is_for(setup)]
                for setup in chosen[:1] if study.of_one_seed else chosen:
                    found += [(name, title, asked) for asked in study.ask(setup)]
        return found

    @cached_property
    def steps(self) -> list[Step[Any]]:
        """All steps, those that others need first."""
        return list(with_needs(step for _, _, asked in self._asked for step in asked.steps))

    def results(self, store: Store) -> dict[str, VariantResults]:
        """By variant, the results of what is done so far."""
        found: dict[str, dict[str, Any]] = {name: {} for name in self.suite.variants}
        for variant, title, asked in self._asked:
            records = [store.load(step) for step in asked.steps]
            if None not in records:
                found[variant].setdefault(title, []).extend(asked.results(*records))
        studies = self.suite.studies
        for parts in found.values():
            for title, study in studies.asked().items():
                if study.of_one_seed and title in parts:
                    (parts[title],) = parts[title]
        target = None if studies.intermediate is None else studies.intermediate.target
        return {
            name: VariantResults(tasks=list(self.suite.tasks), target=target, **parts)
            for name, parts in found.items()
        }
