"""`results.json` of an evaluation: what must be in it for it to be read again."""

from typing import Any

from pydantic import ConfigDict, Field, model_validator

from matsmerge.guarded_files import Content, Count


class ReadingContent(Content):
    """How to read a metric."""

    higher_is_better: bool = True
    in_percent: bool = True


class TaskContent(Content):
    """A task as it was scored."""

    kind: str
    metrics: dict[str, ReadingContent] = Field(min_length=1)
    num_examples: Count
    split: str | None = None
    data: str | None = None
    fingerprint: str | None = None
    seed: int | None = None


class ScoreContent(Content):
    """A score, which a model that broke may not have as a number."""

    value: float = Field(allow_inf_nan=True)
    standard_error: float | None = Field(default=None, allow_inf_nan=True)


class ModelContent(Content):
    """A model that was scored; what else is known of it is let be."""

    model_config = ConfigDict(extra="allow")

    source: str | None = None
    fingerprint: str | None = None


class ResultsContent(Content):
    """Scores by model, task and metric."""

    tasks: dict[str, TaskContent] = Field(min_length=1)
    models: dict[str, ModelContent]
    scores: dict[str, dict[str, dict[str, ScoreContent]]] = Field(min_length=1)
    arguments: dict[str, Any]
    versions: dict[str, str]
    notes: list[str]

    @model_validator(mode="after")
    def _check_scores(self) -> "ResultsContent":
        for model, by_task in self.scores.items():
            for task, by_metric in by_task.items():
                if task not in self.tasks:
                    raise ValueError(f"the model '{model}' has scores of an unknown task '{task}'")
                for metric in self.tasks[task].metrics:
                    if metric not in by_metric:
                        raise ValueError(f"'{model}' has no score by '{metric}' on '{task}'")
        return self
