"""Scores as tables: of one run, and of several side by side."""

from collections.abc import Iterator, Mapping, Sequence

from matsmerge.errors import DataError
from matsmerge.experiments.results import SuiteResults, VariantResults
from matsmerge.experiments.summary import Summary, mean_test, ranked, rows_of, summarise, task_test

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def score_tables(results: SuiteResults) -> Iterator[Table]:
    """Test scores of every variant, in percent, the best last."""
    for name, variant in results.variants.items():
        if variant.comparison:
            rows = [
                (
                    method,
                    *(str(task_test(rows_of(variant, method), task)) for task in variant.tasks),
                    str(mean_test(rows_of(variant, method))),
                )
                for method in ranked(variant)
            ]
            yield f"{name}: test accuracy in percent", ("", *variant.tasks, "mean"), rows
        if variant.intermediate:
            donors = list(dict.fromkeys(found.donor for found in variant.intermediate))
            scores = _scores(variant)
            methods = dict.fromkeys(found.method for found in variant.intermediate)
            rows = [(m, *(str(scores[f"{m} with {d}"]) for d in donors)) for m in methods]
            title = f"{name}: test accuracy of {variant.target} in percent, merged with"
            yield title, ("", *donors), rows


def compare_runs(runs: Mapping[str, SuiteResults]) -> Iterator[Table]:
    """For each variant, the mean test score of each method; then what the runs differ in."""
    first_name, first = next(iter(runs.items()))
    variants = [v for v in first.variants if all(v in run.variants for run in runs.values())]
    if not variants:
        raise DataError(f"the runs have no variant in common ({', '.join(runs)})")
    for variant in variants:
        found = {name: _scores(run.variants[variant]) for name, run in runs.items()}
        rows = []
        for method in dict.fromkeys(m for scores in found.values() for m in scores):
            cells = [method]
            for name, scores in found.items():
                cell = str(scores.get(method, "-"))
                if name != first_name and method in scores and method in found[first_name]:
                    gain = 100 * (scores[method].mean - found[first_name][method].mean)
                    cell += f" ({gain:+.1f})"
                cells.append(cell)
            rows.append(cells)
        yield f"{variant}: test accuracy in percent, mean over tasks", ("", *runs), rows
    yield "what they were run with", ("", *runs), _differences(runs)


def _scores(variant: VariantResults) -> dict[str, Summary]:
    """Of every method, or of every method and donor."""
    scores = {method: mean_test(rows_of(variant, method)) for method in ranked(variant)}
    keys = dict.fromkeys((found.method, found.donor) for found in variant.intermediate)
    for method, donor in keys:
        own = [f.score for f in variant.intermediate if (f.method, f.donor) == (method, donor)]
        scores[f"{method} with {donor}"] = summarise(own)
    return scores


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
