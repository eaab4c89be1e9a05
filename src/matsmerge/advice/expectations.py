"""What merges like this one kept of the separate models' accuracy, in our suites."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from matsmerge.advice.advice import Finding


@dataclass(frozen=True)
class _Suite:
    """A suite of docs/results."""

    name: str
    change: float  # how far a typical matrix moved, relative to its norm
    kept: Mapping[str, float]  # method -> accuracy, percent of that of separate models


# Accuracies are those of docs/results/README.md; changes were measured on the suites' models.
_SUITES = (
    _Suite(
        "text-small",
        0.02,
        {
            "mats_cross": 99,
            "mats_kfac": 98,
            "actmat": 97,
            "regmean": 96,
            "task_arithmetic": 90,
            "average": 89,
        },
    ),
    _Suite(
        "vision-small",
        0.1,
        {"mats_cross": 96, "mats_kfac": 67, "regmean": 64, "actmat": 62, "average": 54},
    ),
)


def expect(method: str, change: float) -> Iterator[Finding]:
    """How good a method was in the suite whose models moved about as far as these."""
    if not 0 < change < math.inf:
        return
    suite = min(_SUITES, key=lambda s: abs(math.log(change / s.change)))
    own = suite.kept.get(method)
    known = f"{method} kept {own:.0f} % and averaging" if own else "averaging kept"
    yield Finding(
        "expectation",
        "note",
        f"Of our suites, {suite.name} is the most like this: its models moved by {suite.change:.0%}"
        f" of a typical matrix's norm. There {known} {suite.kept['average']:.0f} % of the separate "
        "models' accuracy. Check the result on your own tasks (mats evaluate).",
    )
