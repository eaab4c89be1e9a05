"""Scores over seeds as tables: of one run, and of several side by side."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from matsmerge.errors import DataError
from matsmerge.lab.evaluation.results import INDIVIDUAL
from matsmerge.lab.experiments.suite_results import NO_MERGES, SuiteResults, VariantResults

Value = TypeVar("Value")
TextTable = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, header, rows


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and its standard error from how far the values differ; None of a single one.

    Neither is a number if one of the values is none.
    """
    if not all(map(math.isfinite, values)):
        return math.nan, None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def grouped(pairs: Iterable[tuple[Any, Value]]) -> dict[Any, list[Value]]:
    """Values by their keys, both in the order in which they come."""
    found: dict[Any, list[Value]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


def score_tables(results: SuiteResults) -> Iterator[TextTable]:
    """Test scores of every variant, in percent, the best last."""
    for name, variant in results.variants.items():
        if variant.comparison:
            rows = []
            for method in _means(variant):
                found = [row.test for row in variant.comparison if row.method == method]
                scores = [[one.tasks[task] for one in found] for task in variant.tasks]
                scores.append([one.mean for one in found])
                rows.append([method, *map(_percent, scores)])
            yield f"{name}: test accuracy in percent", ("", *variant.tasks, "mean"), rows
        if variant.intermediate:
            donors = list(dict.fromkeys(found.donor for found in variant.intermediate))
            methods = dict.fromkeys(found.method for found in variant.intermediate)
            means = _means(variant)
            rows = [[m, *(_percent(means[f"{m} with {d}"]) for d in donors)] for m in methods]
            title = f"{name}: test accuracy of {variant.target} in percent, merged with"
            yield title, ("", *donors), rows


def verdicts(results: SuiteResults) -> Iterator[str]:
    """For each variant, which merge scored best, and how far it is from separate models."""
    for title, variant in results.variants.items():
        means = {
            name: mean_and_error(values)[0]
            for name, values in _means(variant).items()
            if name.partition(" with ")[0] not in NO_MERGES
        }
        if not means:
            continue
        best = max(means, key=lambda method: means[method])
        own = [row.test.mean for row in variant.comparison if row.method == INDIVIDUAL]
        beside = f"; a model for each task has {_percent(own)} %" if own else ""
        yield f"{title}: best is {best} with {100 * means[best]:.1f} % on test data{beside}"


def compare_runs(runs: Mapping[str, SuiteResults]) -> Iterator[TextTable]:
    """For each variant, the mean test score of each method; then what the runs differ in."""
    first_name, first = next(iter(runs.items()))
    variants = [v for v in first.variants if all(v in run.variants for run in runs.values())]
    if not variants:
        raise DataError(f"the runs have no variant in common ({', '.join(runs)})")
    for variant in variants:
        found = {name: _means(run.variants[variant]) for name, run in runs.items()}
        rows = []
        for method in dict.fromkeys(m for scores in found.values() for m in scores):
            cells = [method]
            for name, scores in found.items():
                cell = _percent(scores[method]) if method in scores else "-"
                if name != first_name and method in scores and method in found[first_name]:
                    names = (first_name, name)
                    before, after = (mean_and_error(found[n][method])[0] for n in names)
                    cell += f" ({100 * (after - before):+.1f})"
                cells.append(cell)
            rows.append(cells)
        yield f"{variant}: test accuracy in percent, mean over tasks", ("", *runs), rows
    yield "what they were run with", ("", *runs), _differences(runs)


def _means(variant: VariantResults) -> dict[str, list[float]]:
    """Mean scores of each seed, by method (the best last), or by method and donor."""
    scores = grouped((row.method, row.test.mean) for row in variant.comparison)
    return {
        **dict(sorted(scores.items(), key=lambda item: mean_and_error(item[1])[0])),
        **grouped((f"{one.method} with {one.donor}", one.score) for one in variant.intermediate),
    }


def _percent(values: Sequence[float]) -> str:
    mean, error = mean_and_error(values)
    shown = f"{without_noise(100 * mean):.1f}"
    return shown if error is None else f"{shown} ± {100 * error:.1f}"


def without_noise(number: float) -> float:
    """A number without its last digits, which depend on the order in which others were added.

    So one that lies between two that are shown (60.75) is the same wherever it is shown.
    """
    return round(number, 9)


def _differences(runs: Mapping[str, SuiteResults]) -> list[list[str]]:
    about = {name: _about(run) for name, run in runs.items()}
    keys = dict.fromkeys(key for found in about.values() for key in found)
    table = [[key, *(found.get(key, "-") for found in about.values())] for key in keys]
    same = ["everything", *["the same"] * len(runs)]
    return [row for row in table if len(set(row[1:])) > 1] or [same]


def _about(run: SuiteResults) -> dict[str, str]:
    return {
        "suite": run.name,
        "seeds": ", ".join(map(str, run.seeds)),
        "tasks": ", ".join(run.suite.get("tasks", {})),
        "local files": "; ".join(run.replaced) or "-",
        "commit": (run.commit or "-")[:12],
        **{f"{name} version": version for name, version in run.versions.items()},
        **{name: str(value) for name, value in run.machine.items()},
        **{f"suite: {key}": str(value)[:60] for key, value in run.suite.items() if key != "about"},
    }
