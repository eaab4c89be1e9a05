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

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {100 * self.error:.1f}"
        return f"{100 * self.mean:.1f}{error}"


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and its standard error from how far the values differ; None of a single one.

    Neither is a number if one of the values is none.
    """
    if not all(map(math.isfinite, values)):
        return math.nan, None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def summarise(values: Iterable[float]) -> Summary:
    return Summary(*mean_and_error(list(values)))


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
