"""Scores of many models on many tasks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, model_validator

from matsmerge.errors import DataError
from matsmerge.files.guarded_files import Content, Count, parse_as, quoted
from matsmerge.lab.evaluation.metrics import METRICS, RESAMPLING_SEED, Score
from matsmerge.lab.evaluation.outcome import Outcome
from matsmerge.markdown_text import escape as escape_markdown
from matsmerge.markdown_text import table_of
from matsmerge.notebook_table import notebook_table

A = TypeVar("A")
B = TypeVar("B")

RESULTS_FORMAT = 1
Right = Annotated[str, Field(pattern="^[01]*$")]  # by example, as in `metrics.Score`
INDIVIDUAL, ENSEMBLE = "individual", "ensemble"  # rows that are no single model


class Reading(Content):
    """How to read a metric."""

    higher_is_better: bool = True
    in_percent: bool = True

    @classmethod
    def of(cls, metric: str) -> "Reading":
        found = METRICS[metric]
        return cls(higher_is_better=found.higher_is_better, in_percent=found.in_percent)


class ScoredTask(Content):
    """A task as it was scored; the first of its metrics is the one that is averaged."""

    kind: str
    metrics: dict[str, Reading] = Field(min_length=1)
    num_examples: Count
    split: str | None = None
    data: str | None = None
    fingerprint: str | None = None  # of the data
    seed: int | None = None  # of its splits and templates

    @property
    def metric(self) -> str:
        return next(iter(self.metrics))

    @property
    def reading(self) -> Reading:
        return self.metrics[self.metric]


class _ScoreContent(Content):
    """A score in a file; the value of a broken model may be NaN or infinite."""

    value: float = Field(allow_inf_nan=True)
    standard_error: float | None = Field(default=None, allow_inf_nan=True)
    right: Right = ""

    def to_score(self) -> Score:
        error = self.standard_error
        return Score(self.value, math.nan if error is None else error, self.right)


class _ModelContent(Content):
    """A model in a file; other keys are kept as they are."""

    model_config = ConfigDict(extra="allow")

    source: str | None = None
    fingerprint: str | None = None


class _ResultsContent(Content):
    """What a results.json must say to be read again: scores by model, task and metric."""

    tasks: dict[str, ScoredTask] = Field(min_length=1)
    models: dict[str, _ModelContent]
    scores: dict[str, dict[str, dict[str, _ScoreContent]]] = Field(min_length=1)
    arguments: dict[str, Any]
    versions: dict[str, str]
    notes: list[str]

    @model_validator(mode="after")
    def _check_scores(self) -> "_ResultsContent":
        for model, by_task in self.scores.items():
            for task, by_metric in by_task.items():
                if task not in self.tasks:
                    raise ValueError(f"the model '{model}' has scores of an unknown task '{task}'")
                for metric in self.tasks[task].metrics:
                    if metric not in by_metric:
                        raise ValueError(f"'{model}' has no score by '{metric}' on '{task}'")
        return self


@dataclass(frozen=True)
class Results:
    """Scores by model, task and metric; a model is a row.

    The row `individual` has, for each task, the score of the model that was trained for it, by
    which averages are normalised. `models` says what each row is, `arguments` what was asked for.
    """

    tasks: Mapping[str, ScoredTask]
    models: Mapping[str, Mapping[str, Any]]
    scores: Mapping[str, Mapping[str, Mapping[str, Score]]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    outcomes: Mapping[str, Mapping[str, Outcome]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def score(self, model: str, task: str) -> Score | None:
        """A model's score by the task's first metric; None if it was not scored on the task."""
        found = self.scores[model].get(task)
        return None if found is None else found[self.tasks[task].metric]

    def average(self, model: str) -> Score | None:
        """The mean over tasks, whose errors are independent; None if scores are not comparable."""
        found = [self.score(model, task) for task in self.tasks]
        scores = [score for score in found if score is not None]
        alike = {"percent" if t.reading.in_percent else t.metric for t in self.tasks.values()}
        if len(scores) < len(found) or len(alike) != 1:
            return None
        error = math.sqrt(sum(score.error**2 for score in scores)) / len(scores)
        return Score(sum(score.value for score in scores) / len(scores), error)

    def normalised(self, model: str) -> float | None:
        """The mean over tasks of score / individual score; of a loss, individual / score.

        More than 1 is better than the individual models. Tasks without an individual model do
        not count. None where the model was not scored, or a score to divide by is not positive.
        """
        if INDIVIDUAL not in self.scores:
            return None
        ratios = []
        for name, task in self.tasks.items():
            mine, individual = self.score(model, name), self.score(INDIVIDUAL, name)
            if individual is None:
                continue
            if mine is None:
                return None
            a, b = mine.value, individual.value
            if not task.reading.higher_is_better:
                a, b = b, a
            if b <= 0:
                return None
            ratios.append(a / b)
        return sum(ratios) / len(ratios) if ratios else None

    def beside(self, other: "Results") -> "Results":
        """These results and those of the same models on other tasks, in one table."""
        if twice := sorted(set(self.tasks) & set(other.tasks)):
            raise DataError(f"two tasks are named '{twice[0]}'; rename one (name:)")
        rows = dict.fromkeys([*self.scores, *other.scores])
        return Results(
            {**self.tasks, **other.tasks},
            {**other.models, **self.models},
            {row: {**self.scores.get(row, {}), **other.scores.get(row, {})} for row in rows},
            {**other.arguments, **self.arguments},
            {**self.versions, **other.versions},
            [*self.notes, *other.notes],
            {**other.outcomes, **self.outcomes},
        )

    def to_json(self) -> dict[str, Any]:
        """Everything except the predictions; the same evaluation gives the same content."""
        return {
            "format_version": RESULTS_FORMAT,
            "versions": dict(self.versions),
            "arguments": dict(self.arguments),
            "resampling_seed": RESAMPLING_SEED,
            "tasks": {name: task.model_dump() for name, task in self.tasks.items()},
            "models": {name: dict(about) for name, about in self.models.items()},
            "scores": _convert(_score_to_json, self.scores),
            "averages": {
                model: {
                    "average": _score_to_json(self.average(model)),
                    "normalised": self.normalised(model),
                }
                for model in self.scores
            },
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, content: Any, where: str = "the results") -> "Results":
        """Results from what `to_json` gave; errors name `where` it was found."""
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != RESULTS_FORMAT:
            raise DataError(
                f"{where}: expected results of an evaluation in format {RESULTS_FORMAT}, found "
                f"{quoted(version)}; were they written by another version of matsmerge?"
            )
        found = parse_as(content, _ResultsContent, where, DataError)
        return cls(
            found.tasks,
            {name: model.model_dump(exclude_unset=True) for name, model in found.models.items()},
            _convert(_ScoreContent.to_score, found.scores),
            found.arguments,
            found.versions,
            found.notes,
        )

    def __repr__(self) -> str:
        return f"<Results {', '.join(self.scores)} on {', '.join(self.tasks)}>"

    def _repr_html_(self) -> str:
        heads, rows = self.cells()
        shown = {
            row[0]: ", ".join(map(" ".join, zip(heads[1:], row[1:], strict=True))) for row in rows
        }
        return notebook_table(self.title, shown)

    @property
    def verdict(self) -> str | None:
        """What the scores say in a sentence; None where there is nothing to compare."""
        found = {m: self.normalised(m) for m in self.scores if m != INDIVIDUAL}
        ratios = {m: r for m, r in found.items() if r is not None and not math.isnan(r)}
        if ratios and INDIVIDUAL in self.scores:
            name = max(ratios, key=lambda model: ratios[model])
            return (
                f"{name} reaches {ratios[name]:.1%} of what a model of its own for each task does"
            )
        return self._ranking

    @property
    def _ranking(self) -> str | None:
        """Which model is best on average; None where averages mean nothing."""
        found = {model: mean for model in self.scores if (mean := self.average(model))}
        how = next(iter(self.tasks.values())).reading
        if len(found) < len(self.scores) or not all(math.isfinite(f.value) for f in found.values()):
            return None
        order = sorted(found, key=lambda m: found[m].value, reverse=how.higher_is_better)
        best = f"{order[0]} has {_show(found[order[0]], how)}"
        if len(order) == 1:
            return f"{best} on average; --individual TASK=MODEL says what merging has cost"
        gap = abs(found[order[0]].value - found[order[1]].value)
        error = math.hypot(found[order[0]].error, found[order[1]].error)
        sure = "clearly" if gap > 2 * error else "not clearly"
        second = f"{order[1]} with {_show(found[order[1]], how)}"
        return f"best on average: {best}, {sure} ahead of {second}"

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Heads of columns, and rows, as text: score ± standard error, in percent where usual."""
        columns = [(name, metric) for name, task in self.tasks.items() for metric in task.metrics]
        kinds = {metric for _, metric in columns}
        heads = ["model"] + [
            name if len(kinds) == 1 else f"{name} {metric}" for name, metric in columns
        ]
        has_average = len(self.tasks) > 1
        has_individual = INDIVIDUAL in self.scores
        heads += ["average"] * has_average + ["normalised"] * has_individual
        rows = []
        for model, by_task in self.scores.items():
            row = [model]
            for name, metric in columns:
                score = by_task.get(name, {}).get(metric)
                row.append(_show(score, self.tasks[name].metrics[metric]))
            if has_average:
                row.append(_show(self.average(model), next(iter(self.tasks.values())).reading))
            if has_individual:
                ratio = self.normalised(model)
                row.append("-" if ratio is None else f"{ratio:.3f}")
            rows.append(row)
        return heads, rows

    @property
    def title(self) -> str:
        """The metric of the table, or `scores` where there are several."""
        found = {(m, how.in_percent) for t in self.tasks.values() for m, how in t.metrics.items()}
        names = [name + (" in percent" if percent else "") for name, percent in found]
        what = names[0] if len(names) == 1 else "scores"
        return f"{what} ± standard error"

    def to_markdown(self) -> str:
        """The table, and what was scored."""
        lines = [f"{self.title}\n", table_of(*self.cells()), ""]
        for name, task in self.tasks.items():
            of = f"split {task.split} of " if task.split else ""
            where = f"{of}{task.data}" if task.data else "lm-evaluation-harness"
            text = f"{name}: {task.kind}, {task.num_examples:,} examples, {where}"
            lines.append(f"- {escape_markdown(text)}")
        lines += [f"- note: {escape_markdown(note)}" for note in self.notes]
        return "\n".join(lines) + "\n"


def _convert(
    convert: Callable[[A], B], scores: Mapping[str, Mapping[str, Mapping[str, A]]]
) -> dict[str, dict[str, dict[str, B]]]:
    """Apply a function to every score, by model, task and metric."""
    return {
        model: {
            task: {metric: convert(score) for metric, score in by_metric.items()}
            for task, by_metric in by_task.items()
        }
        for model, by_task in scores.items()
    }


def _show(score: Score | None, how: Reading) -> str:
    if score is None:
        return "-"
    factor, form = (100, ".1f") if how.in_percent else (1, ".4f")
    shown = f"{factor * score.value:{form}}"
    return shown if math.isnan(score.error) else f"{shown} ± {factor * score.error:{form}}"


def _score_to_json(score: Score | None) -> dict[str, Any] | None:
    if score is None:
        return None
    error = None if math.isnan(score.error) else score.error
    content = {"value": score.value, "standard_error": error}
    return content | ({"right": score.right} if score.right else {})
