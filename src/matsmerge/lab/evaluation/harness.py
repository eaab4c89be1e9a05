"""Benchmarks of language models, run by lm-evaluation-harness."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.public_names import public_name
from matsmerge.errors import DataError, closest
from matsmerge.lab.evaluation.metrics import Score
from matsmerge.lab.evaluation.results import Reading, Results, ScoredTask
from matsmerge.lab.evaluation.task_evaluation import EvaluationSettings
from matsmerge.models.model_folder import ModelFolder, open_model
from matsmerge.optional_import import import_optional
from matsmerge.tasks.task import has_any
from matsmerge.tasks.text_encoder import TOKENIZER_FILES
from matsmerge.version import versions

KIND = "lm_eval"
# What the harness gives as a share of 1; a perplexity, say, is a number of its own.
_SHARES = ("exact_match", "em", "f1", "mcc", "mc1", "mc2")


class Harness:
    """The harness with the tasks that were asked for; unknown ones are an error.

    A task is a name that the harness knows (a task, a group or a tag), or a YAML file in its
    format. `quiet` hides the bars that it draws.
    """

    def __init__(self, tasks: Sequence[str], *, quiet: bool = False) -> None:
        self._library = import_optional("lm_eval")
        self._quiet = quiet
        self.tasks = list(dict.fromkeys(tasks))
        names = [task for task in self.tasks if not _is_file(task)]
        # Its own files, more than ten thousand, are read only if one of them may be meant.
        manager = import_optional("lm_eval.tasks").TaskManager(include_defaults=bool(names))
        self._manager, known = manager, list(manager.all_tasks)
        problems = [
            f"lm-evaluation-harness has no task '{task}'{closest(task, known)}"
            for task in names
            if task not in known
        ]
        problems += [
            f"{task}: no such file; expected a task of lm-evaluation-harness in YAML"
            for task in self.tasks
            if _is_file(task) and not Path(task).is_file()
        ]
        if problems or not self.tasks:
            raise DataError(problems or "give at least one task of lm-evaluation-harness")

    def load(self, task: str) -> dict[str, Any]:
        """A task with its data, by its name; of a group or a tag, all its tasks."""
        with self._running(task):
            found: dict[str, Any] = self._manager.load([task])["tasks"]
        return found

    def run(self, models: Mapping[str, str], settings: EvaluationSettings | None = None) -> Results:
        """Score every model on every task."""
        settings = settings or EvaluationSettings()
        tasks: dict[str, ScoredTask] = {}
        scores: dict[str, dict[str, dict[str, Score]]] = {}
        about: dict[str, dict[str, Any]] = {}
        for row, source in models.items():
            opened = open_model(source)
            scores[row], found = self.score(opened, settings)
            tasks |= found
            about[row] = {
                "source": public_name(source),
                "fingerprint": fingerprint(opened.checkpoint),
            }
        named = {name: public_name(source) for name, source in models.items()}
        asked = [Path(task).name if _is_file(task) else task for task in self.tasks]
        arguments = {"models": named, "lm_eval": asked, **vars(settings)}
        own = str(getattr(self._library, "__version__", "unknown"))
        return Results(
            tasks, about, scores, arguments, versions("torch", "transformers") | {"lm_eval": own}
        )

    def score(
        self, opened: ModelFolder, settings: EvaluationSettings, tasks: Sequence[Any] | None = None
    ) -> tuple[dict[str, dict[str, Score]], dict[str, ScoredTask]]:
        """A model's scores by task and metric, and what was scored; of loaded `tasks`, if given."""
        device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
        with self._running(opened.label):
            found = self._library.simple_evaluate(
                model="hf",
                model_args=_model_args(opened) | {"dtype": settings.dtype or "auto"},
                tasks=self.tasks if tasks is None else list(tasks),
                batch_size=settings.batch_size,
                device=device,
                limit=settings.num_examples,
                task_manager=self._manager,
                log_samples=False,
            )
        return _read(found)

    @contextmanager
    def _running(self, what: str) -> Iterator[None]:
        """Turn whatever the harness raises into an error about a model or about tasks."""
        try:
            with redirect_stderr(io.StringIO()) if self._quiet else nullcontext():
                yield
        except Exception as error:  # data that cannot be had, models it cannot load
            raise DataError(
                f"{what}: lm-evaluation-harness failed ({first_line(error)})"
            ) from error


def reading_of(metric: str, higher_is_better: Mapping[str, bool | None]) -> Reading:
    """How to read a metric of the harness."""
    is_share = metric.startswith("acc") or metric in _SHARES
    better = higher_is_better.get(metric) is not False
    return Reading(higher_is_better=better, in_percent=is_share)


def _is_file(task: str) -> bool:
    return Path(task).suffix in (".yaml", ".yml")


def _model_args(opened: ModelFolder) -> dict[str, str]:
    """The harness's arguments for a model; an adapter is given beside its base."""
    found = {"pretrained": str(opened.base.folder)}
    if opened.adapter is not None:
        found["peft"] = str(opened.checkpoint.folder)
        if has_any(opened.folders[0], TOKENIZER_FILES):
            found["tokenizer"] = str(opened.checkpoint.folder)
    return found


def _read(found: Any) -> tuple[dict[str, dict[str, Score]], dict[str, ScoredTask]]:
    """Scores of tasks; of a group with a score of its own that one alone."""
    results = found.get("results") if isinstance(found, Mapping) else None
    if not isinstance(results, Mapping):
        raise DataError("lm-evaluation-harness gave no results")
    scores = {name: _scores(values) for name, values in results.items()}
    members = {
        member
        for group, inside in found.get("group_subtasks", {}).items()
        if scores.get(group)
        for member in inside
    }
    kept = {name: by_key for name, by_key in scores.items() if by_key and name not in members}
    if not kept:
        raise DataError(f"lm-evaluation-harness gave no scores for {', '.join(results)}")
    tasks = {}
    for name, by_metric in kept.items():
        better = found.get("higher_is_better", {}).get(name, {})
        metrics = {key: reading_of(key.partition("/")[0], better) for key in by_metric}
        num = found.get("n-samples", {}).get(name, {}).get("effective", 0)
        tasks[name] = ScoredTask(kind=KIND, metrics=metrics, num_examples=int(num))
    return kept, tasks


def _scores(values: Mapping[str, Any]) -> dict[str, Score]:
    """Scores by metric, from keys such as `acc,none` and `acc_stderr,none`."""
    scores: dict[str, Score] = {}
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        if not comma or not isinstance(value, (int, float)) or metric.endswith("_stderr"):
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        name = metric if filtered == "none" else f"{metric}/{filtered}"
        own = float(error) if isinstance(error, (int, float)) else math.nan
        scores[name] = Score(float(value), own)
    return scores
