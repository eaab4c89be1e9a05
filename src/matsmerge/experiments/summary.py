"""Scores over seeds: means and standard errors."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matsmerge.experiments.results import Row, VariantResults


@dataclass(frozen=True)
class Summary:
    """Of several seeds, or of one."""

    mean: float
    error: float | None  # standard error over seeds; None of a single one
    num_seeds: int

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {100 * self.error:.1f}"
        return f"{100 * self.mean:.1f}{error}"


def summarise(values: Iterable[float]) -> Summary:
    """The mean, and its standard error from how far the values differ."""
    found = list(values)
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None
    return Summary(statistics.fmean(found), error, len(found))


def rows_of(variant: VariantResults, method: str) -> list[Row]:
    return [row for row in variant.comparison if row.method == method]


def methods_of(variant: VariantResults) -> list[str]:
    """Methods and references, in the order of the results."""
    return list(dict.fromkeys(row.method for row in variant.comparison))


def mean_test(rows: Sequence[Row]) -> Summary:
    """Of the mean over tasks."""
    return summarise(row.test.mean for row in rows)


def task_test(rows: Sequence[Row], task: str) -> Summary:
    return summarise(row.test.tasks[task] for row in rows)


def ranked(variant: VariantResults) -> list[str]:
    """The best last, as tables have it."""
    return sorted(methods_of(variant), key=lambda m: mean_test(rows_of(variant, m)).mean)
