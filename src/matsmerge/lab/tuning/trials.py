"""Trials of a search, kept line by line so that nothing is tried twice."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, computed_field, model_validator

from matsmerge.errors import AnotherRunError, DataError, NonFiniteError, OutputError
from matsmerge.files.guarded_files import Content, parse_as, read_json
from matsmerge.files.journal_file import JournalFile, line_of, read_journal_lines
from matsmerge.lab.tuning.search_space import describe_choice

# What the folder of a search holds.
JOURNAL, RECIPE, MODEL, REPORT = "trials.jsonl", "recipe.yaml", "model", "tuning.json"
# What is not a number is null in files.
TrialScore = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None),
]


class Trial(Content):
    """A choice, and how the merge it gives scores; or why it gives none."""

    choice: dict[str, Any]  # with the number of iterations, if it is one of the places
    scores: dict[str, TrialScore] = Field(default_factory=dict)  # of each task, its first metric
    errors: dict[str, TrialScore] = Field(default_factory=dict)  # standard errors
    failure: str | None = None

    @property
    def key(self) -> str:
        return choice_key(self.choice)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def score(self) -> TrialScore:
        """The mean over tasks; NaN of a merge that failed."""
        return sum(self.scores.values()) / len(self.scores) if self.scores else math.nan

    @property
    def error(self) -> float:
        """The standard error of the mean, whose tasks are independent; 0 of what has none."""
        known = [error for error in self.errors.values() if math.isfinite(error)]
        return math.sqrt(sum(error**2 for error in known)) / max(1, len(self.scores))

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(exclude={"failure"} if self.failure is None else None)


class _Identity(Content):
    identity: str


class _TuningReport(Content):
    best: Trial
    trials: list[Trial] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_best(self) -> "_TuningReport":
        if not math.isfinite(self.best.score):
            raise ValueError("the best trial has no score")
        if self.trials and all(trial.choice != self.best.choice for trial in self.trials):
            raise ValueError("the best trial is none of the trials")
        return self


def read_tuning_report(path: Path) -> dict[str, Any]:
    """The content of a `tuning.json`, which `mats tune` writes beside a model."""
    content = read_json(path, DataError)
    found = parse_as(content, _TuningReport, str(path), DataError)
    options = parse_as(content.get("options", {}), dict[str, Any], f"{path}: options", DataError)
    trials = [trial.to_json() for trial in found.trials]
    return {**content, "options": options, "best": found.best.to_json(), "trials": trials}


def trial_table(trials: Iterable[Trial]) -> tuple[list[str], list[list[Any]]]:
    """Heads of columns, and a row for each trial: what was tried, scores by task, their mean."""
    trials = list(trials)
    tasks = list(dict.fromkeys(task for trial in trials for task in trial.scores))
    rows = [
        [
            describe_choice(trial.choice),
            *(trial.scores.get(task, math.nan) for task in tasks),
            trial.score,
        ]
        for trial in trials
    ]
    return ["tried", *tasks, "mean"], rows


def choice_key(choice: Mapping[str, Any]) -> str:
    """The same for the same choice."""
    return json.dumps(choice, sort_keys=True)


def best(trials: Iterable[Trial], *, lowest: bool = False) -> Trial:
    """The trial with the highest score, or the lowest; of equal ones the first."""
    scored = [trial for trial in trials if math.isfinite(trial.score)]
    if not scored:
        raise NonFiniteError("none of the merges that were tried could be scored; try others")
    return (min if lowest else max)(scored, key=lambda trial: trial.score)


def trial_of_line(line: Any, where: str) -> Trial:
    """A trial from a line of a journal; `where` begins what is said of a damaged one."""
    return parse_as(line, Trial, where, OutputError)


class Journal:
    """A line for every trial, after one that says what they are trials of."""

    def __init__(self, path: Path, identity: str, *, resume: bool) -> None:
        """Begin, or go on where the same search was interrupted."""
        self.trials: dict[str, Trial] = {}
        lines, num_bytes = read_journal_lines(path) if resume else ([], 0)
        if not lines:  # it begins, or was stopped before it had begun
            self._file = JournalFile.begin(path, {"identity": identity})
            return
        first = parse_as(lines[0], _Identity, line_of(path, 1), OutputError)
        if first.identity != identity:
            raise AnotherRunError(
                f"{path.parent}: the interrupted search had another recipe, other models, "
                "statistics, tasks or values to try; start anew with --overwrite"
            )
        for number, line in enumerate(lines[1:], 2):
            trial = trial_of_line(line, line_of(path, number))
            self.trials[trial.key] = trial
        self._file = JournalFile.resume(path, num_bytes)

    def add(self, trial: Trial) -> None:
        self.trials[trial.key] = trial
        self._file.note(trial.to_json())
