"""Tasks of lm-evaluation-harness to choose a merge by."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from matsmerge.errors import DataError, NonFiniteError
from matsmerge.lab.evaluation.harness import Harness, reading_of
from matsmerge.lab.evaluation.metrics import Score
from matsmerge.lab.evaluation.results import Reading
from matsmerge.lab.evaluation.task_evaluation import EvaluationSettings
from matsmerge.lab.tuning.tuning_file import TuningOptions
from matsmerge.models.model_folder import open_model


@dataclass(frozen=True)
class HarnessTasks:
    """The tasks, and the split whose documents decide. A process loads them once.

    A task is given as the harness knows it, with the metric after a colon if it is not the
    task's first: `hellaswag:acc_norm`.
    """

    asked: Sequence[str]
    split: str = "validation"
    settings: EvaluationSettings = field(default_factory=EvaluationSettings)

    def __getstate__(self) -> dict[str, Any]:
        # Another process loads the tasks itself.
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @cached_property
    def _harness(self) -> Harness:
        return Harness([_parts(task)[0] for task in self.asked], quiet=True)

    @cached_property
    def _tasks(self) -> dict[str, tuple[Any, str]]:
        """The harness's tasks by name, with documents of the split alone, and their metrics."""
        found: dict[str, tuple[Any, str]] = {}
        problems: list[str] = []
        for name, wanted in map(_parts, self.asked):
            for own, task in self._harness.load(name).items():
                problems += _restrict(own, task, self.split)
                known = list(task.higher_is_better())
                if wanted is not None and wanted.partition("/")[0] not in known:
                    problems.append(f"{own}: has no metric '{wanted}', but {', '.join(known)}")
                found[own] = task, wanted or known[0]
        DataError.raise_all(problems)
        return found

    @property
    def metrics(self) -> dict[str, str]:
        """The metric of each task."""
        return {name: metric for name, (_, metric) in self._tasks.items()}

    @property
    def readings(self) -> dict[str, Reading]:
        """How to read the metric of each task."""
        return {
            name: reading_of(metric.partition("/")[0], task.higher_is_better())
            for name, (task, metric) in self._tasks.items()
        }

    @property
    def identity(self) -> list[Any]:
        """What a search must have in common with an earlier one that it continues."""
        content = [
            [name, metric, task.dump_config(), list(task.eval_docs)]
            for name, (task, metric) in self._tasks.items()
        ]
        whole = json.dumps(content, default=str, sort_keys=True)
        return [self.split, hashlib.sha256(whole.encode()).hexdigest()]

    def score(self, folder: Path) -> dict[str, Score]:
        """A model's score on each task."""
        tasks = [task for task, _ in self._tasks.values()]
        found, _ = self._harness.score(open_model(str(folder)), self.settings, tasks)
        return {name: _pick(name, metric, found[name]) for name, metric in self.metrics.items()}


def harness_of(options: TuningOptions) -> HarnessTasks | None:
    """The tasks of the harness that a search is to choose by."""
    if not options.lm_eval:
        return None
    if options.unlabelled:
        raise DataError(
            "tasks of lm-evaluation-harness are scored by their labels; leave out --unlabelled"
        )
    settings = EvaluationSettings(num_examples=options.num_examples, batch_size=options.batch_size)
    return HarnessTasks(options.lm_eval, options.split, settings)


def _parts(asked: str) -> tuple[str, str | None]:
    task, _, metric = asked.partition(":")
    return task, metric or None


def _restrict(name: str, task: Any, split: str) -> list[str]:
    """Let a task have one split; the harness takes test documents where there are any."""
    has = {"validation": task.has_validation_docs(), "test": task.has_test_docs()}
    if split not in has:
        return [f"{name}: tasks of lm-evaluation-harness have no split '{split}'"]
    if not has[split]:
        hint = "; --split test chooses by its test documents, which then prove nothing"
        return [f"{name}: has no {split} documents" + hint * (split == "validation")]
    if split == "validation" and has["test"]:
        task.set_config("test_split", None)
        if task.has_test_docs():
            return [f"{name}: its Python class always scores test documents; use another task"]
    return []


def _pick(name: str, metric: str, scores: Mapping[str, Score]) -> Score:
    """The score by a metric; of several filters of answers, the first."""
    found = [s for key, s in scores.items() if metric in (key, key.partition("/")[0])]
    if not found:
        raise DataError(f"{name}: expected a score '{metric}', found {', '.join(scores)}")
    if found[0].value != found[0].value:
        raise NonFiniteError(f"{name}: its score is not a number")
    return found[0]
