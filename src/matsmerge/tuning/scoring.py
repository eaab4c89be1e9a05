"""How a merged model scores on the validation data of its tasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matsmerge.errors import DataError
from matsmerge.evaluation.evaluating import evaluate, resolve_head
from matsmerge.evaluation.metrics import METRICS, choose_metrics
from matsmerge.statistics.statistics import Statistics
from matsmerge.tasks.data import Data, fingerprint_rows
from matsmerge.tasks.kept_base import KeptBase
from matsmerge.tasks.model_loading import load_model
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task_file import TaskFile, read_task_file


@dataclass(frozen=True)
class ValidationTask:
    """A task with the data to choose by."""

    name: str
    described: TaskFile
    data: Data


@dataclass(frozen=True)
class Scorer:
    """Scores models on tasks. An adapter's base stays in memory from one model to the next."""

    tasks: Sequence[ValidationTask]
    num_examples: int | None
    batch_size: int
    kept: KeptBase

    def score(self, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
        """The first metric of each task, so that higher is better, and its standard error."""
        scores: dict[str, float] = {}
        errors: dict[str, float] = {}
        for task in self.tasks:
            described = task.described
            loaded = load_model(
                folder,
                task=described.task,
                head=resolve_head(folder, described),
                tokenizer=described.tokenizer,
                options=described.options(),
                kept=self.kept,
            )
            outcome = evaluate(
                loaded,
                task.data,
                described,
                batch_size=self.batch_size,
                num_examples=self.num_examples,
            )
            metric = choose_metrics(described, loaded.task.kind)[0]
            found = outcome.scores([metric])[metric]
            sign = 1.0 if METRICS[metric].higher_is_better else -1.0
            scores[task.name], errors[task.name] = sign * found.value, found.error
        return scores, errors


def read_validation_tasks(
    paths: Sequence[str | Path | TaskFile], split: str
) -> list[ValidationTask]:
    """The tasks and their data; the test split is never looked at."""
    if split == "test":
        raise DataError(
            "tuning never looks at the test split: what is chosen by it cannot be scored by it any "
            "more; use a validation split"
        )
    tasks = []
    problems: list[str] = []
    for path in paths:
        try:
            described = path if isinstance(path, TaskFile) else read_task_file(path)
            tasks.append(
                ValidationTask(str(described.name), described, read_split(described, split))
            )
        except DataError as error:
            problems += error.problems
    names = [task.name for task in tasks]
    problems += [f"two tasks are named '{n}'" for n in sorted(set(names)) if names.count(n) > 1]
    if problems:
        raise DataError(problems)
    return tasks


def overlaps(statistics: Statistics, label: str, tasks: Sequence[ValidationTask]) -> list[str]:
    """Where statistics were collected from the very data that is tuned on."""
    problems = []
    for origin in statistics.header.data:
        for task in tasks:
            rows = task.data.rows[: statistics.header.num_examples]
            is_same = origin.fingerprint == fingerprint_rows(rows, task.data.folder)
            if is_same or (origin.split is not None and origin.split == task.data.split):
                problems.append(
                    f"{label}: collected from {origin.name}, split '{origin.split}', and "
                    f"'{task.name}' is tuned on '{task.data.split}'; collect from another split, "
                    "or allow it with --allow-overlap"
                )
                break
    return problems
