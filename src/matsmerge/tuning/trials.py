"""What has been tried, kept line by line so that nothing is tried twice."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matsmerge.errors import OutputError


@dataclass(frozen=True)
class Trial:
    """A choice, and how the merge it gives scores."""

    choice: Mapping[str, Any]  # with the number of iterations, if it is one of the places
    scores: Mapping[str, float]  # of each task, by its first metric; higher is better
    errors: Mapping[str, float]  # standard errors

    @property
    def score(self) -> float:
        """The mean over tasks."""
        return sum(self.scores.values()) / len(self.scores)

    @property
    def key(self) -> str:
        return choice_key(self.choice)


def choice_key(choice: Mapping[str, Any]) -> str:
    """The same for the same choice."""
    return json.dumps(choice, sort_keys=True)


def best(trials: Iterable[Trial]) -> Trial:
    """The trial with the highest score; of equal ones the first."""
    return max(trials, key=lambda trial: trial.score)


class Journal:
    """A file with a line for every trial, after a line that says what they are trials of."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self._identity = identity
        self.trials: dict[str, Trial] = {}

    def open(self, *, resume: bool) -> None:
        """Begin, or go on where the same search was interrupted."""
        if not resume or not self.path.exists():
            self.path.write_text(json.dumps({"identity": self._identity}) + "\n")
            return
        lines = []
        for line in self.path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:  # the line that was being written when the run died
                break
        if not lines or lines[0].get("identity") != self._identity:
            raise OutputError(
                f"{self.path.parent}: the interrupted search had another recipe, other models, "
                "statistics, tasks or values to try; start anew with --overwrite"
            )
        for line in lines[1:]:
            trial = Trial(line["choice"], line["scores"], line["errors"])
            self.trials[trial.key] = trial
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def add(self, trial: Trial) -> None:
        self.trials[trial.key] = trial
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
