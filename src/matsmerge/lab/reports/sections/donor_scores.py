"""A target task's model merged with a model of each other task, its donor."""

from collections.abc import Sequence
from statistics import fmean

from matsmerge.lab.experiments.score_tables import grouped
from matsmerge.lab.experiments.suite_results import INDIVIDUAL, NO_MERGES, Intermediate
from matsmerge.lab.reports.document import Block, Column, Figure, Table
from matsmerge.lab.reports.numbers import NOTHING, choice_text, fixed, paper_cell
from matsmerge.lab.reports.scores import Score, score_cells
from matsmerge.lab.reports.sections.score_dots import dots_by_task
from matsmerge.lab.reports.variant import Variant


def donor_scores(variant: Variant) -> list[Block]:
    """Dots and a table of the target's scores, and what validation chose with each donor."""
    found, label, paper = variant.found.intermediate, variant.label, variant.paper
    if not found:
        return []
    errors = {(one.donor, one.method): one.error for one in found}
    shares = grouped(((one.donor, one.method), one.score) for one in found)
    scores = {key: Score.over_seeds(values, errors[key]) for key, values in shares.items()}
    donors, methods = (list(dict.fromkeys(key[i] for key in scores)) for i in (0, 1))
    are_merges = [method not in NO_MERGES for method in methods]
    columns: list[Column] = [("", [label(method) for method in methods])]
    for donor in donors:
        column = [scores.get((donor, method)) for method in methods]
        columns.append((donor, score_cells(column, are_merges)))
        if paper.donors:
            papers = [paper_cell(fixed(paper.of_donor(method, donor))) for method in methods]
            columns.append((f"{donor}, paper's", papers))
    what = f"score of {variant.found.target or 'the target task'}, percent"
    title = f"Test {what}, after merging with a model of each other task"
    table = Table.of_columns(columns, title)
    if not any(are_merges):
        return [table]
    values = {
        label(m): [score.value if (score := scores.get((d, m))) else None for d in donors]
        for m in methods
    }
    merges = [label(m) for m in methods if m not in NO_MERGES]
    best = max(merges, key=lambda name: fmean(value or 0.0 for value in values[name]))
    others = [name for name in values if name not in merges]
    plot = dots_by_task(donors, values, best, others, f"test {what}")
    caption = (
        f"Every donor's row: {best}, the best on average, in colour; {label(INDIVIDUAL)} is the "
        "target's own model, not merged."
    )
    figure = Figure("Merged with each donor", caption, plot, table)
    return [figure, table, *_choices(variant, found, donors)]


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
