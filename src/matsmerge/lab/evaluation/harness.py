"""Benchmarks of language models, run by lm-evaluation-harness."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.public_names import public_name
from matsmerge.errors import DataError, closest
from matsmerge.lab.evaluation.metrics import Score
from matsmerge.lab.evaluation.results import Reading, Results, ScoredTask
from matsmerge.lab.evaluation.task_evaluation import Settings
from matsmerge.models.model_folder import ModelFolder, open_model
from matsmerge.optional_import import import_optional
from matsmerge.tasks.task import has_any
from matsmerge.tasks.text_encoder import TOKENIZER_FILES
from matsmerge.version import versions

KIND = "lm_eval"
# What the harness gives as a share of 1; a perplexity, say, is a number of its own.
_SHARES = ("exact_match", "em", "f1", "mcc", "mc1", "mc2")


class Harness:
    """The harness with the tasks that were asked for; unknown ones are an error."""

    def __init__(self, tasks: Sequence[str]) -> None:
        self._library = import_optional("lm_eval")
        self._manager = import_optional("lm_eval.tasks").TaskManager()
        self.tasks = list(dict.fromkeys(tasks))
        known = list(self._manager.all_tasks)
        problems = [
            f"lm-evaluation-harness has no task '{task}'{closest(task, known)}"
            for task in self.tasks
            if task not in known
        ]
        if problems or not self.tasks:
            raise DataError(problems or "give at least one task of lm-evaluation-harness")

    def run(self, models: Mapping[str, str], settings: Settings | None = None) -> Results:
        """Score every model on every task."""
        settings = settings or Settings()
        tasks: dict[str, ScoredTask] = {}
        scores: dict[str, dict[str, dict[str, Score]]] = {}
        about: dict[str, dict[str, Any]] = {}
        for row, source in models.items():
            opened = open_model(source)
            found = self._run_one(opened, settings)
            scores[row] = {}
            for task in self.tasks:
                scores[row][task], tasks[task] = _read(found, task)
            about[row] = {
                "source": public_name(source),
                "fingerprint": fingerprint(opened.checkpoint),
            }
        named = {name: public_name(source) for name, source in models.items()}
        arguments = {"models": named, "lm_eval": self.tasks, **vars(settings)}
        own = str(getattr(self._library, "__version__", "unknown"))
        return Results(
            tasks, about, scores, arguments, versions("torch", "transformers") | {"lm_eval": own}
        )

    def _run_one(self, opened: ModelFolder, settings: Settings) -> Mapping[str, Any]:
        device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
        model_args = _model_args(opened) | {"dtype": settings.dtype or "auto"}
        try:
            found = self._library.simple_evaluate(
                model="hf",
                model_args=model_args,
                tasks=self.tasks,
                batch_size=settings.batch_size,
                device=device,
                limit=settings.num_examples,
                task_manager=self._manager,
                log_samples=False,
            )
        except Exception as error:  # data that cannot be had, models it cannot load
            raise DataError(
                f"{opened.label}: lm-evaluation-harness failed ({first_line(error)})"
            ) from error
        if not isinstance(found, Mapping) or not isinstance(found.get("results"), Mapping):
            raise DataError(f"{opened.label}: lm-evaluation-harness gave no results")
        return found


def _model_args(opened: ModelFolder) -> dict[str, str]:
    """The harness's arguments for a model; an adapter is given beside its base."""
    found = {"pretrained": str(opened.base.folder)}
    if opened.adapter is not None:
        found["peft"] = str(opened.checkpoint.folder)
        if has_any(opened.folders[0], TOKENIZER_FILES):
            found["tokenizer"] = str(opened.checkpoint.folder)
    return found


def _read(found: Mapping[str, Any], task: str) -> tuple[dict[str, Score], ScoredTask]:
    """Scores of a task, from keys such as `acc,none` and `acc_stderr,none`."""
    values = found["results"].get(task, {})
    better = found.get("higher_is_better", {}).get(task, {})
    scores: dict[str, Score] = {}
    metrics: dict[str, Reading] = {}
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        is_score = isinstance(value, (int, float)) and not metric.endswith("_stderr")
        if not comma or not is_score:
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        name = metric if filtered == "none" else f"{metric}/{filtered}"
        known = isinstance(error, (int, float))
        scores[name] = Score(float(value), float(error) if known else math.nan)
        is_share = metric.startswith("acc") or metric in _SHARES
        metrics[name] = Reading(
            higher_is_better=better.get(metric) is not False, in_percent=is_share
        )
    if not scores:
        raise DataError(f"lm-evaluation-harness gave no scores for the task '{task}'")
    num = found.get("n-samples", {}).get(task, {}).get("effective", 0)
    return scores, ScoredTask(kind=KIND, metrics=metrics, num_examples=int(num))
