"""A target task's model merged with a model of each other task, its donor."""

from collections.abc import Sequence
from statistics import fmean

from matsmerge.lab.experiments.suite_results import INDIVIDUAL, REFERENCES, Intermediate
from matsmerge.lab.reports.document import Block, Cell, Figure, Table
from matsmerge.lab.reports.numbers import (
    NOTHING,
    choice_text,
    fixed,
    grouped,
    mean_of,
    paper_cell,
    score_cell,
)
from matsmerge.lab.reports.sections.score_dots import dots_by_task
from matsmerge.lab.reports.variant import Variant

_NO_MERGES = (*REFERENCES, "sequential")  # training the donor's model further


def donor_scores(variant: Variant) -> list[Block]:
    """Dots and a table of the target's scores, and what validation chose with each donor."""
    found, label = variant.found.intermediate, variant.label
    if not found:
        return []
    scores = grouped(((one.donor, one.method), one.score) for one in found)
    donors, methods = (list(dict.fromkeys(key[i] for key in scores)) for i in (0, 1))
    what = f"score of {variant.found.target or 'the target task'}, percent"
    table = Table(
        *_rows(variant, scores, donors, methods),
        f"Test {what}, after merging with a model of each other task",
    )
    means = {m: [mean_of(scores.get((donor, m), [])) for donor in donors] for m in methods}
    merges = {m: fmean(v or 0.0 for v in means[m]) for m in methods if m not in _NO_MERGES}
    if not merges:
        return [table]
    best = label(max(merges, key=lambda method: merges[method]))
    plot = dots_by_task(
        donors,
        {label(m): [None if v is None else 100 * v for v in means[m]] for m in methods},
        best,
        [label(method) for method in methods if method in _NO_MERGES],
        f"test {what}",
    )
    caption = (
        f"Every donor's row: {best}, the best on average, in colour; {label(INDIVIDUAL)} is the "
        "target's own model, not merged."
    )
    figure = Figure("Merged with each donor", caption, plot, table)
    return [figure, table, *_choices(variant, found, donors)]


def _rows(
    variant: Variant,
    scores: dict[tuple[str, str], list[float]],
    donors: Sequence[str],
    methods: Sequence[str],
) -> tuple[list[str], list[list[Cell | str]]]:
    """Heads and rows: the target's score with each method and donor, the paper's beside it."""
    paper = variant.paper
    errors = {(one.donor, one.method): one.error for one in variant.found.intermediate}
    heads = ["", *(h for d in donors for h in ([d, f"{d}, paper's"] if paper.donors else [d]))]
    rows: list[list[Cell | str]] = []
    for method in methods:
        row: list[Cell | str] = [variant.label(method)]
        for donor in donors:
            values = scores.get((donor, method), [])
            merges = [
                fmean(v) for (d, m), v in scores.items() if d == donor and m not in _NO_MERGES
            ]
            best = method not in _NO_MERGES and bool(values) and fmean(values) == max(merges)
            row.append(score_cell(values, best=best, error=errors.get((donor, method))))
            if paper.donors:
                row.append(paper_cell(fixed(paper.of_donor(method, donor))))
        rows.append(row)
    return heads, rows


def _choices(variant: Variant, found: Sequence[Intermediate], donors: Sequence[str]) -> list[Block]:
    """What validation chose with each donor, where there was a choice."""
    first = min(one.seed for one in found)
    chosen = {(one.method, one.donor): one.chosen for one in found if one.seed == first}
    rows = [
        [variant.label(m), *(choice_text(chosen.get((m, d), {})) or NOTHING for d in donors)]
        for m in dict.fromkeys(method for (method, _), choice in chosen.items() if choice)
    ]
    seed = f" (seed {first})" if len({one.seed for one in found}) > 1 else ""
    return [Table(["", *donors], rows, f"Chosen by validation{seed}")] if rows else []
