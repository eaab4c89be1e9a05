"""How a merged model scores on the validation data of its tasks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from matsmerge.data.rows import Data, fingerprint_rows
from matsmerge.errors import DataError
from matsmerge.lab.evaluation.metrics import Score, choose_metrics
from matsmerge.lab.evaluation.results import Reading
from matsmerge.lab.evaluation.task_evaluation import evaluate_task, resolve_head
from matsmerge.lab.tuning.harness_score import HarnessTasks
from matsmerge.models.kept_base import KeptBase
from matsmerge.problems import noted
from matsmerge.statistics.prepared_collection import ExampleChoice, row_numbers
from matsmerge.statistics.statistics import Origin, Statistics
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.splits import read_source, read_split
from matsmerge.tasks.task_file import TaskFile, read_task_file


@dataclass(frozen=True)
class ValidationTask:
    """A task with the data to choose by."""

    name: str
    described: TaskFile
    data: Data
    metric: str

    @cached_property
    def source(self) -> Data | None:
        """All rows of what the data is a part of."""
        return read_source(self.described, self.data.split)


@dataclass(frozen=True, kw_only=True)
class Scorer(ABC):
    """Scores models on tasks. An adapter's base stays in memory from one model to the next."""

    tasks: Sequence[ValidationTask]
    num_examples: int | None
    batch_size: int
    kept: KeptBase = field(default_factory=KeptBase)
    harness: HarnessTasks | None = None  # tasks that another library scores

    needs_targets: ClassVar[bool] = True

    @property
    @abstractmethod
    def lower_is_better(self) -> bool:
        """Whether the best model has the lowest score."""

    @property
    @abstractmethod
    def in_percent(self) -> bool:
        """Whether scores are shares."""

    @abstractmethod
    def measure(self, loaded: LoadedModel, task: ValidationTask) -> Score:
        """What a model's score on one task is."""

    def prepare(self) -> None:  # noqa: B027 (most have nothing to write)
        """Write what scoring in several processes reads."""

    @property
    def metrics(self) -> dict[str, str]:
        """The metric of each task."""
        own = {task.name: task.metric for task in self.tasks}
        return own if self.harness is None else {**own, **self.harness.metrics}

    def score(self, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
        """The score of each task, and its standard error."""
        scores: dict[str, float] = {}
        errors: dict[str, float] = {}
        for task in self.tasks:
            found = self.measure(self.load(folder, task), task)
            scores[task.name], errors[task.name] = found.value, found.error
        if self.harness is not None:
            for name, found in self.harness.score(folder).items():
                scores[name], errors[name] = found.value, found.error
        return scores, errors

    def load(self, source: str | Path, task: ValidationTask) -> LoadedModel:
        """A model with its head for a task."""
        return load_model(
            source,
            task.described,
            head=resolve_head(source, task.described),
            need_targets=self.needs_targets,
            kept=self.kept,
        )


class LabelScorer(Scorer):
    """Scores by each task's first metric, against the labels of its data."""

    @property
    def lower_is_better(self) -> bool:
        return not self._reading.higher_is_better

    @property
    def in_percent(self) -> bool:
        return self._reading.in_percent

    @property
    def _reading(self) -> Reading:
        """How to read the metrics, which are all of one kind."""
        return next(iter(readings(self.tasks, self.harness).values()))

    def measure(self, loaded: LoadedModel, task: ValidationTask) -> Score:
        outcome = evaluate_task(
            loaded,
            task.data,
            task.described,
            batch_size=self.batch_size,
            num_examples=self.num_examples,
        )
        return outcome.score(task.metric)


def read_validation_tasks(
    paths: Sequence[str | Path | TaskFile], split: str, metric: str | None = None
) -> list[ValidationTask]:
    """The tasks and their data; the test split is never looked at.

    All are scored by a `metric` that needs no labels, if one is given, else each by its own first.
    """
    tasks = []
    problems: list[str] = []
    for path in paths:
        with noted(problems, DataError):
            described = path if isinstance(path, TaskFile) else read_task_file(path)
            source = str((described.splits or {}).get(split)).partition("[")[0]
            if "test" in (split, source):
                raise DataError(
                    "tuning never looks at the test split: what is chosen by it cannot be scored "
                    "by it any more; use a validation split"
                )
            own = choose_metrics(described)[0] if metric is None else metric
            data = read_split(described, split)
            tasks.append(ValidationTask(str(described.name), described, data, own))
    DataError.raise_all(problems)
    return tasks


def readings(tasks: Sequence[ValidationTask], harness: HarnessTasks | None) -> dict[str, Reading]:
    """How to read the metric of each task."""
    own = {task.name: Reading.of(task.metric) for task in tasks}
    return own if harness is None else {**own, **harness.readings}


def check_together(
    tasks: Sequence[ValidationTask], harness: HarnessTasks | None, metric: str | None = None
) -> None:
    """Refuse tasks of one name, and metrics that have no mean to tune by."""
    metrics = [(task.name, task.metric) for task in tasks]
    metrics += [] if harness is None else harness.metrics.items()
    names = [name for name, _ in metrics]
    problems = [f"two tasks are named '{n}'" for n in sorted(set(names)) if names.count(n) > 1]
    if metric is None and len(set(readings(tasks, harness).values())) > 1:
        shown = ", ".join(f"{name} {metric}" for name, metric in metrics)
        problems.append(f"shares and losses have no mean to tune by: {shown}")
    if not metrics:
        problems.append("say what to tune for with at least one task")
    DataError.raise_all(problems)


def overlaps(statistics: Statistics, label: str, tasks: Sequence[ValidationTask]) -> list[str]:
    """Problems with statistics that were collected from the very data that is tuned on."""
    problems = []
    for origin in statistics.header.data:
        for task in tasks:
            if origin.split in ("test", task.data.split) or _is_of(origin, statistics, task):
                of = "without a split" if origin.split is None else f"split '{origin.split}'"
                problems.append(
                    f"{label}: collected from {origin.name}, {of}, and '{task.name}' is tuned on "
                    f"'{task.data.split}'; collect from another split (`mats collect --task "
                    "TASK.yaml --split train`), or allow it with --allow-overlap"
                )
                break
    return problems


def _is_of(origin: Origin, statistics: Statistics, task: ValidationTask) -> bool:
    """Were statistics collected from a task's data, or from what that is a part of?

    Rows are known by their fingerprint: the first of them, or as many at random.
    """
    for data in filter(None, (task.data, task.source)):
        for shuffle in (False, True):
            choice = ExampleChoice(statistics.header.num_examples, shuffle)
            numbers = row_numbers(len(data), choice, statistics.header.options.seed)
            rows = (data.rows[n] for n in numbers)
            if origin.fingerprint == fingerprint_rows(rows, data.folder):
                return True
    return False
