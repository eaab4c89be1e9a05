"""Runs of suites side by side."""

from collections.abc import Iterator, Mapping, Sequence

from matsmerge.errors import DataError
from matsmerge.experiments.results import SuiteResults
from matsmerge.experiments.summary import mean_test, methods_of, rows_of

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def compare_runs(runs: Mapping[str, SuiteResults]) -> Iterator[Table]:
    """For each variant, the mean test score of each method; then what the runs differ in."""
    first_name, first = next(iter(runs.items()))
    variants = [v for v in first.variants if all(v in run.variants for run in runs.values())]
    if not variants:
        raise DataError(f"the runs have no variant in common ({', '.join(runs)})")
    for variant in variants:
        found = {name: run.variants[variant] for name, run in runs.items()}
        methods = list(dict.fromkeys(m for v in found.values() for m in methods_of(v)))
        table = []
        for method in methods:
            cells = [method]
            start = rows_of(found[first_name], method)
            for name in runs:
                rows = rows_of(found[name], method)
                cell = str(mean_test(rows)) if rows else "-"
                if rows and start and name != first_name:
                    gain = 100 * (mean_test(rows).mean - mean_test(start).mean)
                    cell += f" ({gain:+.1f})"
                cells.append(cell)
            table.append(cells)
        yield f"{variant}: test accuracy in percent, mean over tasks", ("", *runs), table
    yield "what they were run with", ("", *runs), _differences(runs)


def _differences(runs: Mapping[str, SuiteResults]) -> list[list[str]]:
    about = {name: _about(run) for name, run in runs.items()}
    keys = dict.fromkeys(key for found in about.values() for key in found)
    table = [[key, *(found.get(key, "-") for found in about.values())] for key in keys]
    return [row for row in table if len(set(row[1:])) > 1] or [
        ["everything", *["the same"] * len(runs)]
    ]


def _about(run: SuiteResults) -> dict[str, str]:
    return {
        "suite": run.name,
        "seeds": ", ".join(map(str, run.seeds)),
        "commit": (run.commit or "-")[:12],
        **{f"{name} version": version for name, version in run.versions.items()},
        **{name: str(value) for name, value in run.machine.items()},
        **{f"suite: {key}": str(value)[:60] for key, value in run.suite.items() if key != "about"},
    }
