"""A suite's steps: what is done for one way to fine-tune and one seed.

Steps are made when they are asked for; those that are the same are done once.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matsmerge.errors import DataError
from matsmerge.lab.evaluation.results import ENSEMBLE, INDIVIDUAL
from matsmerge.lab.experiments.step import Given, Need, StepSource, TaskInput, digest_tree
from matsmerge.lab.experiments.steps import (
    Collect,
    Ensemble,
    Make,
    Merge,
    Merging,
    ScoreModels,
    Scoring,
    Shown,
    Train,
    UnlabelledMerge,
)
from matsmerge.lab.experiments.suite_parts import Made, MethodOfSuite, VariantOfSuite
from matsmerge.lab.training.training_options import make_training_options as training_options
from matsmerge.statistics.collection_options import make_collection_options as statistics_options
from matsmerge.tasks.task_file import TaskFile

if TYPE_CHECKING:
    from matsmerge.lab.experiments.suite import Suite

SUFFIXES = ("", ".jsonl", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Local:
    """Local files that take the place of the base model and the data that a suite names."""

    base: Given | None = None
    data: Mapping[str, Given] = field(default_factory=dict)  # by task

    @property
    def described(self) -> list[str]:
        """What they take the place of, and their names."""
        base = [] if self.base is None else [f"base model: {self.base.path.name}"]
        return base + [f"data of {task}: {given.path.name}" for task, given in self.data.items()]


def local(base: Path | None, data: Path | None, tasks: Collection[str]) -> Local:
    """Find local files: `base` is a model's folder, `data` has a file or a folder per task."""
    folders = {"--base": base, "--data": data}
    missing = [(option, path) for option, path in folders.items() if path and not path.is_dir()]
    if missing:
        raise DataError([f"{option} {path}: no such folder" for option, path in missing])
    found: dict[str, Given] = {}
    if data is not None:
        for task in tasks:
            places = (data / f"{task}{suffix}" for suffix in SUFFIXES)
            if (place := next((p for p in places if p.exists()), None)) is not None:
                found[task] = Given.at(place)
        if not found:
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
    local: Local = field(default_factory=Local)
    taken: tuple[str, str] | None = None  # expectation and split, if not the variant's

    @property
    def variant(self) -> VariantOfSuite:
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

    def base(self) -> StepSource:
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
        contents = {
            source: digest_tree(Path(source)) for source in sources if Path(source).exists()
        }
        return TaskInput(TaskFile.model_validate(content), data, contents)

    def _train(
        self, title: str, base: StepSource, tasks: list[str], options: Mapping[str, Any]
    ) -> Train:
        return Train(
            name=f"train {self.name} {title}",
            base=base,
            tasks=self.tasks(tasks),
            options=training_options(**{**options, "seed": self.seed}),
        )

    def model(self, task: str) -> StepSource:
        """The model that was fine-tuned for a task, or the one that the suite names."""
        named = (self.variant.models or {}).get(task)
        if named is not None:
            return _given(named)
        return self._train(task, self.base(), [task], self.variant.training)

    def models(self, tasks: Iterable[str] | None = None) -> dict[str, StepSource]:
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

    def statistics(self, task: str) -> Collect:
        """Statistics of a task's own model on its own data."""
        variant = self.variant
        expectation, split = self.taken or (variant.expectation, variant.split)
        return Collect(
            name=" ".join(["collect", self.name, task, *(self.taken or ())]),
            model=self.model(task),
            task=self._task(task),
            options=statistics_options(
                statistics=variant.statistics,
                fisher=expectation,
                seed=self.seed,
            ),
            split=split,
            num_examples=variant.num_examples,
            batch_size=self.suite.batch_size,
        )

    def merging(
        self,
        method: MethodOfSuite,
        tasks: list[str] | None = None,
        *,
        with_statistics: bool = False,  # even if the method reads none
    ) -> Merging:
        """The models of some tasks, by default of all, to merge by a method."""
        tasks = tasks or list(self.suite.tasks)
        parsed = method.parsed()
        wanted = tasks if with_statistics or parsed.needed_statistics else []
        own = self
        if method.expectation not in (None, self.variant.expectation) and self.taken is None:
            own = replace(self, taken=(method.expectation, self.variant.split))
        return Merging(
            self.base(),
            self.models(tasks),
            {task: own.statistics(task) for task in wanted},
            method.method,
            parsed.model_dump(mode="json"),
            self.variant.heads,
            {task: self._shown(task) for task in tasks} if method.needs_data else {},
        )

    def _shown(self, task: str) -> Shown:
        variant, size = self.variant, self.suite.batch_size
        return Shown(self._task(task), variant.split, variant.num_examples, size)

    def merge(
        self,
        title: str,
        method: MethodOfSuite,
        *,
        merged: list[str] | None = None,
        scored: list[str] | None = None,
        init: Merge | None = None,
        keep_model: bool = False,
    ) -> Merge:
        """A method, tuned by validation and tested; by default of all models on all tasks."""
        if init is None and method.starts_from is not None:
            init = self.merge(
                method.starts_from,
                self.methods[method.starts_from],
                merged=merged,
                scored=scored,
                keep_model=keep_model,
            )
        kind = UnlabelledMerge if method.unlabelled else Merge
        return kind(
            name=f"merge {self.name} {title}",
            merging=self.merging(method, merged, with_statistics=init is not None),
            tasks=self.tasks(scored or merged),
            scoring=self.scoring,
            search=method.search,
            init=init,
            keep_model=keep_model,
        )

    def compared(self, name: str) -> Merge:
        """One of the suite's methods on all tasks."""
        return self.merge(name, self.methods[name], keep_model=True)

    def score(
        self, row: str, models: Mapping[str, StepSource], tasks: list[str] | None = None
    ) -> ScoreModels:
        """Models that were not merged."""
        return ScoreModels(
            name=f"test {self.name} {row}",
            row=row,
            models=models,
            tasks=self.tasks(tasks),
            scoring=self.scoring,
        )

    def ensemble(
        self, merged: Merge, models: list[str] | None = None, scored: list[str] | None = None
    ) -> Ensemble:
        """Models together, by default all on all tasks; heads are those of a merge."""
        return Ensemble(
            name=" ".join(["test", self.name, ENSEMBLE, *(models or ())]),
            models=self.models(models),
            tasks=self.tasks(scored or models),
            scoring=self.scoring,
            merged=merged,
        )

    def individual(self, tasks: list[str] | None = None) -> ScoreModels:
        """Each task's own model."""
        return self.score(INDIVIDUAL, self.models(tasks), tasks)


def _given(name: str) -> StepSource:
    """A local file or folder by its content; anything else is a name on the hub."""
    path = Path(name).expanduser()
    return Given.at(path) if path.exists() else name
