"""A suite's steps: what is done for one way to fine-tune and one seed.

Steps are made when they are asked for; those that are the same are done once.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matsmerge.errors import DataError
from matsmerge.lab.experiments.step import Given, Need, Source, TaskInput, digest
from matsmerge.lab.experiments.steps import Collect, Make, Merge, Merging, Score, Scoring, Train
from matsmerge.lab.experiments.suite_parts import Made, MethodOfSuite, Variant
from matsmerge.lab.experiments.suite_results import INDIVIDUAL
from matsmerge.lab.training.training_options import make_options as training_options
from matsmerge.methods.method import Method
from matsmerge.recipes.recipe import make_recipe
from matsmerge.statistics.collection_options import make_options as statistics_options
from matsmerge.tasks.task_file import TaskFile

if TYPE_CHECKING:
    from matsmerge.lab.experiments.suite import Suite

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet")
NOTHING = MethodOfSuite(method={"name": "task_arithmetic", "scale": 0.0})  # gives the base


@dataclass(frozen=True)
class Local:
    """Local files that take the place of the base model and the data that a suite names."""

    base: Given | None = None
    data: Mapping[str, Given] = field(default_factory=dict)  # by task


NOTHING_LOCAL = Local()


def local(base: Path | None, data: Path | None, tasks: Collection[str]) -> Local:
    """A folder with a model, and one with a file or a folder for each task."""
    found: dict[str, Given] = {}
    for task in tasks if data is not None else ():
        assert data is not None
        for place in (data / task, *(data / f"{task}{suffix}" for suffix in SUFFIXES)):
            if place.exists():
                found[task] = Given.at(place)
                break
    if data is not None and not found:
        raise DataError(
            f"--data {data}: has nothing for the suite's tasks ({', '.join(tasks)}); expected "
            "TASK.jsonl or a folder TASK with train.jsonl and so on"
        )
    return Local(None if base is None else Given.at(base), found)


@dataclass(frozen=True)
class Setup:
    """One variant of a suite with one seed."""

    suite: "Suite"
    variant_name: str
    seed: int
    local: Local = NOTHING_LOCAL

    @property
    def variant(self) -> Variant:
        return self.suite.variants[self.variant_name]

    @property
    def name(self) -> str:
        return f"{self.variant_name} {self.seed}"

    @property
    def methods(self) -> dict[str, MethodOfSuite]:
        """The suite's methods that make sense for the variant."""
        return {
            name: method
            for name, method in self.suite.methods.items()
            if method.variants is None or self.variant_name in method.variants
        }

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.suite.num_validation, self.suite.num_test, self.suite.batch_size)

    def base(self) -> Source:
        base = self.variant.base or self.suite.base
        if self.local.base is not None:
            return self.local.base
        if isinstance(base, Made):
            return Make(name=f"base {base.source}", source=base.source, options=base.settings)
        return _given(base)

    def tasks(self, names: Iterable[str] | None = None) -> list[TaskInput]:
        """Tasks with their data, by default all of them."""
        return [self._task(name) for name in names or self.suite.tasks]

    def _task(self, name: str) -> TaskInput:
        task = self.suite.tasks[name]
        content = task.model_dump(
            mode="json", exclude_unset=True, exclude={"source", "settings"}
        ) | {"name": name, "seed": task.seed + self.seed}
        data: Need | None = self.local.data.get(name)
        if data is not None:
            content.pop("data", None)
            if self.local.data[name].path.is_dir():
                content.pop("splits", None)
        elif task.source is not None:
            data = Make(name=f"data {name}", source=task.source, options=task.settings)
        named = content.get("data") or {}
        sources = [named] if isinstance(named, str) else list(named.values())
        sources += [content[key] for key in ("head", "tokenizer") if content.get(key)]
        # The hub's are known by their names.
        contents = {source: digest(Path(source)) for source in sources if Path(source).exists()}
        return TaskInput(TaskFile.model_validate(content), data, contents)

    def _train(
        self, title: str, base: Source, tasks: list[str], options: Mapping[str, Any]
    ) -> Train:
        return Train(
            name=f"train {self.name} {title}",
            base=base,
            tasks=self.tasks(tasks),
            options=training_options(**{**options, "seed": self.seed}),
        )

    def model(self, task: str) -> Source:
        """The model that was fine-tuned for a task, or the one that the suite names."""
        named = (self.variant.models or {}).get(task)
        if named is not None:
            return _given(named)
        return self._train(task, self.base(), [task], self.variant.training)

    def models(self, tasks: Iterable[str] | None = None) -> dict[str, Source]:
        return {task: self.model(task) for task in tasks or self.suite.tasks}

    def joint(self) -> Train | None:
        """One model of all tasks, if the variant has one."""
        if self.variant.joint is None:
            return None
        options = {**self.variant.training, **self.variant.joint}
        return self._train("joint", self.base(), list(self.suite.tasks), options)

    def sequential(self, donor: str, target: str, options: Mapping[str, Any]) -> Train:
        """A target task's model that starts from a donor's."""
        own = {**self.variant.training, "fresh_head": True, **options}
        if own.pop("adapter", None) is not None:
            own.pop("target_modules", None), own.pop("feedforward_modules", None)
        return self._train(f"{donor} then {target}", self.model(donor), [target], own)

    def statistics(
        self, task: str, *, expectation: str | None = None, split: str | None = None
    ) -> Collect:
        """Statistics of a task's own model on its own data."""
        variant = self.variant
        how = " ".join(part for part in (expectation, split) if part)
        return Collect(
            name=f"collect {self.name} {task} {how}".strip(),
            model=self.model(task),
            task=self._task(task),
            options=statistics_options(
                statistics=variant.statistics,
                fisher=expectation or variant.expectation,
                seed=self.seed,
            ),
            split=split or variant.split,
            num_examples=variant.num_examples,
            batch_size=self.suite.batch_size,
        )

    def merging(
        self,
        method: MethodOfSuite,
        tasks: list[str] | None = None,
        *,
        with_statistics: bool | None = None,  # None: if the method reads them
        expectation: str | None = None,
        split: str | None = None,
    ) -> Merging:
        """The models of some tasks, by default of all, to merge by a method."""
        tasks = tasks or list(self.suite.tasks)
        if with_statistics is None:
            with_statistics = needs_statistics(method)
        statistics = {
            task: self.statistics(task, expectation=expectation, split=split)
            for task in (tasks if with_statistics else ())
        }
        return Merging(
            self.base(),
            self.models(tasks),
            statistics,
            method.method,
            _parsed(method).model_dump(mode="json"),
            self.variant.heads,
        )

    def merge(
        self,
        title: str,
        method: MethodOfSuite,
        *,
        merged: list[str] | None = None,
        scored: list[str] | None = None,
        init: Merge | None = None,
        keep_model: bool = False,
        expectation: str | None = None,
        split: str | None = None,
    ) -> Merge:
        """A method, tuned by validation and tested; by default of all models on all tasks."""
        return Merge(
            name=f"merge {self.name} {title}",
            merging=self.merging(
                method,
                merged,
                with_statistics=None if init is None else True,
                expectation=expectation,
                split=split,
            ),
            tasks=self.tasks(scored or merged),
            scoring=self.scoring,
            search=method.search,
            init=init,
            keep_model=keep_model,
        )

    def compared(self, name: str) -> Merge:
        """One of the suite's methods on all tasks."""
        return self.merge(name, self.methods[name], keep_model=True)

    def untouched(self) -> Merge:
        """The base model, with each task's head."""
        return self.merge("base", NOTHING)

    def score(
        self, row: str, models: Mapping[str, Source], tasks: list[str] | None = None
    ) -> Score:
        """Models that were not merged."""
        return Score(
            name=f"test {self.name} {row}",
            row=row,
            models=models,
            tasks=self.tasks(tasks),
            scoring=self.scoring,
        )

    def individual(self, tasks: list[str] | None = None) -> Score:
        """Each task's own model."""
        return self.score(INDIVIDUAL, self.models(tasks), tasks)


def _given(name: str) -> Source:
    """A local file or folder by its content; anything else is a name on the hub."""
    path = Path(name).expanduser()
    return Given.at(path) if path.exists() else name


def needs_statistics(method: MethodOfSuite) -> bool:
    """Whether a method reads statistics."""
    return bool(_parsed(method).needed_statistics)


def _parsed(method: MethodOfSuite) -> Method:
    recipe = make_recipe({"models": ["a", "b"], "base": "c", "method": method.method})
    return recipe.method.at_depth(0)
