"""Studies that compare merges by their scores."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from pydantic import Field

from matsmerge.lab.evaluation.results import ENSEMBLE, INDIVIDUAL
from matsmerge.lab.experiments.step import Step
from matsmerge.lab.experiments.studies.study import Asked, Names, Study
from matsmerge.lab.experiments.suite_parts import MethodOfSuite, name_of
from matsmerge.lab.experiments.suite_results import (
    BASE,
    JOINT,
    SEQUENTIAL,
    FisherScore,
    HeatMapCell,
    Intermediate,
    MethodRow,
    ScoredModel,
)
from matsmerge.lab.experiments.suite_setup import Setup
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.statistics.kinds import includes

if TYPE_CHECKING:
    from matsmerge.lab.experiments.suite import Suite


# The base model, with each task's head.
_NOTHING = MethodOfSuite(method={"name": "task_arithmetic", "scale": 0.0})


class ComparisonStudy(Study):
    """All methods on all tasks, beside models that were not merged."""

    def ask(self, setup: Setup) -> Iterator[Asked]:
        steps: dict[str, Step[ScoredModel]] = {INDIVIDUAL: setup.individual()}
        steps |= {name: setup.compared(name) for name in setup.methods}
        base = setup.merge("base", _NOTHING, keep_model=True)
        steps[BASE] = base
        if (joint := setup.joint()) is not None:
            steps[JOINT] = setup.score(JOINT, {JOINT: joint})
        if setup.suite.ensemble:
            steps[ENSEMBLE] = setup.ensemble(base)
        for name, step in steps.items():
            yield Asked.of(step, _row, method=name, seed=setup.seed)


def _row(found: ScoredModel, **about: Any) -> MethodRow:
    return MethodRow(**about, **dict(found))


class HeatMapStudy(Study):
    """Every objective from every init, iterations chosen by validation."""

    inits: list[str]  # names of the suite's methods, each as it was tuned
    objectives: dict[str, str | dict[str, Any]]  # by label
    iterations: Any = "10:100:10"

    def names(self, suite: "Suite", /) -> Iterator[Names]:
        yield "inits", self.inits, suite.methods
        yield "objectives", map(name_of, self.objectives.values()), OBJECTIVES

    def ask(self, setup: Setup) -> Iterator[Asked]:
        inits = [init for init in self.inits if init in setup.methods]
        for init, (label, objective) in product(inits, self.objectives.items()):
            if _has_statistics(setup, objective):
                start = setup.compared(init)
                method = {"name": "mats", "objective": objective}
                search = {"iterations": self.iterations}
                step = setup.merge(
                    f"{init} to {label}", MethodOfSuite(method=method, search=search), init=start
                )
                about = {"init": init, "objective": label, "seed": setup.seed}
                yield Asked.of(step, _cell, start, **about)


def _has_statistics(setup: Setup, objective: str | dict[str, Any]) -> bool:
    """Whether the variant collects the statistics that the objective needs."""
    needed = OBJECTIVES[name_of(objective)]().statistic
    there = setup.variant.statistics
    return needed is None or includes(there, needed)


def _cell(found: ScoredModel, start: ScoredModel, **about: Any) -> HeatMapCell:
    return HeatMapCell(**about, score=found.test.mean, of_init=start.test.mean, chosen=found.chosen)


class FisherStudy(Study):
    """Empirical or true Fisher information, from which split."""

    methods: list[str]  # of the suite's, as they are given, iterations searched
    splits: list[str] = Field(default=["train", "validation"])

    def names(self, suite: "Suite", /) -> Iterator[Names]:
        yield "methods", self.methods, suite.methods

    def ask(self, setup: Setup) -> Iterator[Asked]:
        own = [name for name in self.methods if name in setup.methods]
        for name, expectation, split in product(own, ("empirical", "true"), self.splits):
            taken = replace(setup, taken=(expectation, split))
            step = taken.merge(f"{name} {expectation} {split}", setup.methods[name])
            about = {"method": name, "expectation": expectation, "split": split}
            yield Asked.of(step, _fisher_score, **about, seed=setup.seed)


def _fisher_score(found: ScoredModel, **about: Any) -> FisherScore:
    assert found.validation is not None
    return FisherScore(**about, score=found.validation)


class IntermediateStudy(Study):
    """A target task's model merged with one of another task; takes the comparison's place."""

    target: str
    donors: list[str]
    sequential: dict[str, Any] | None = None  # training the donor's model further; None: no

    def names(self, suite: "Suite", /) -> Iterator[Names]:
        yield "tasks", [self.target, *self.donors], suite.tasks

    def ask(self, setup: Setup) -> Iterator[Asked]:
        target = self.target
        for donor in self.donors:
            steps: dict[str, Step[ScoredModel]] = {INDIVIDUAL: setup.individual([target])}
            for name, method in setup.methods.items():
                title = f"{target} with {donor} {name}"
                steps[name] = setup.merge(title, method, merged=[target, donor], scored=[target])
            if setup.suite.ensemble:
                base = setup.merge(
                    f"{target} with {donor} base",
                    _NOTHING,
                    merged=[target, donor],
                    scored=[target],
                    keep_model=True,
                )
                steps[ENSEMBLE] = setup.ensemble(base, [target, donor], [target])
            if self.sequential is not None:
                model = setup.sequential(donor, target, self.sequential)
                title = f"{donor} then {target}"
                steps[SEQUENTIAL] = setup.score(title, {target: model}, [target])
            for name, step in steps.items():
                yield Asked.of(step, _target_score, donor=donor, method=name, seed=setup.seed)


def _target_score(found: ScoredModel, **about: Any) -> Intermediate:
    (score,), (error,) = found.test.tasks.values(), found.test.errors.values()
    kept: dict[str, Any] = {"validation": found.validation, "chosen": found.chosen}
    return Intermediate(**about, score=score, error=error, **kept)
