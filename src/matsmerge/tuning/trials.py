"""What has been tried, kept line by line so that nothing is tried twice."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matsmerge.errors import AnotherRunError, NonFiniteError, OutputError
from matsmerge.guarded_files import Content, decode, parse_as, parse_json, read_bytes
from matsmerge.whole_folder import put_text

Scores = dict[str, float | None]


class TrialContent(Content):
    """A trial as files hold it; what is not a number is null."""

    choice: dict[str, Any]
    score: float | None = None
    scores: Scores
    errors: Scores
    failure: str | None = None


class _Identity(Content):
    identity: str


@dataclass(frozen=True)
class Trial:
    """A choice, and how the merge it gives scores; or why it gives none."""

    choice: Mapping[str, Any]  # with the number of iterations, if it is one of the places
    scores: Mapping[str, float] = field(default_factory=dict)  # of each task, its first metric
    errors: Mapping[str, float] = field(default_factory=dict)  # standard errors
    failure: str | None = None

    @property
    def score(self) -> float:
        """The mean over tasks; NaN of a merge that failed."""
        return sum(self.scores.values()) / len(self.scores) if self.scores else math.nan

    @property
    def key(self) -> str:
        return choice_key(self.choice)

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is not a number is null."""
        return {
            "choice": dict(self.choice),
            "score": _plain(self.score),
            "scores": {task: _plain(value) for task, value in self.scores.items()},
            "errors": {task: _plain(value) for task, value in self.errors.items()},
            **({"failure": self.failure} if self.failure else {}),
        }

    @classmethod
    def from_json(cls, content: TrialContent) -> "Trial":
        scores, errors = (
            {task: math.nan if value is None else value for task, value in found.items()}
            for found in (content.scores, content.errors)
        )
        return cls(content.choice, scores, errors, content.failure)


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def choice_key(choice: Mapping[str, Any]) -> str:
    """The same for the same choice."""
    return json.dumps(choice, sort_keys=True)


def best(trials: Iterable[Trial], *, lowest: bool = False) -> Trial:
    """The trial with the highest score, or the lowest; of equal ones the first."""
    scored = [trial for trial in trials if math.isfinite(trial.score)]
    if not scored:
        raise NonFiniteError("none of the merges that were tried could be scored; try others")
    return (min if lowest else max)(scored, key=lambda trial: trial.score)


class Journal:
    """A file with a line for every trial, after a line that says what they are trials of."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self._identity = identity
        self.trials: dict[str, Trial] = {}

    def open(self, *, resume: bool) -> None:
        """Begin, or go on where the same search was interrupted."""
        lines = self._lines() if resume and self.path.exists() else []
        if not lines:  # it begins, or was stopped before it had begun
            put_text(self.path, json.dumps({"identity": self._identity}) + "\n")
            return
        try:
            first = parse_as(lines[0], _Identity, str(self.path), OutputError)
            found = [
                parse_as(line, TrialContent, f"{self.path}: line {number}", OutputError)
                for number, line in enumerate(lines[1:], 2)
            ]
        except OutputError as error:
            advice = f"{self.path}: it was damaged or edited; start anew with --overwrite"
            raise OutputError([*error.problems, advice]) from error
        if first.identity != self._identity:
            raise AnotherRunError(
                f"{self.path.parent}: the interrupted search had another recipe, other models, "
                "statistics, tasks or values to try; start anew with --overwrite"
            )
        for trial in map(Trial.from_json, found):
            self.trials[trial.key] = trial
        put_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))

    def _lines(self) -> list[Any]:
        """What was noted, up to the line that was being written when the run died."""
        found = []
        *whole, rest = read_bytes(self.path, OutputError).split(b"\n")
        for number, line in enumerate([*whole, *([rest] if rest else [])], 1):
            try:
                text = decode(line, f"{self.path}: line {number}", OutputError)
                found.append(parse_json(text, f"{self.path}: line {number}", OutputError))
            except OutputError:
                break
        return found

    def add(self, trial: Trial) -> None:
        self.trials[trial.key] = trial
        with self.path.open("a") as file:
            file.write(json.dumps(trial.to_json()) + "\n")
