"""A target task's model merged with a model of each other task, its donor."""

from collections.abc import Sequence

from matsmerge.lab.evaluation.results import INDIVIDUAL
from matsmerge.lab.experiments.score_tables import grouped
from matsmerge.lab.experiments.suite_results import NO_MERGES, Intermediate
from matsmerge.lab.reports.document import Block, Column, Table
from matsmerge.lab.reports.numbers import NOTHING, choice_text, fixed, paper_cell
from matsmerge.lab.reports.scores import (
    ShownScore,
    colour_scale,
    gaps,
    score_cells,
    shades_text,
)
from matsmerge.lab.reports.variant import Variant


def donor_scores(variant: Variant) -> list[Block]:
    """A table of the target's scores, and what validation chose with each donor."""
    found, label, paper = variant.found.intermediate, variant.label, variant.paper
    if not found:
        return []
    errors = {(one.donor, one.method): one.error for one in found}
    shares = grouped(((one.donor, one.method), one.score) for one in found)
    scores = {key: ShownScore.over_seeds(values, errors[key]) for key, values in shares.items()}
    donors, methods = (list(dict.fromkeys(key[i] for key in scores)) for i in (0, 1))
    are_merges = [method not in NO_MERGES for method in methods]
    columns: list[Column] = [("", [label(method) for method in methods])]
    own = {donor: scores.get((donor, INDIVIDUAL)) for donor in donors}
    found_by = {donor: [scores.get((donor, method)) for method in methods] for donor in donors}
    away = {donor: gaps(column, own[donor]) for donor, column in found_by.items()}
    scale = colour_scale([gap for column in away.values() for gap in column])
    for donor, column in found_by.items():
        shades = [None if gap is None else gap / scale for gap in away[donor]]
        columns.append((donor, score_cells(column, are_merges, shades=shades)))
        if paper.donors:
            papers = [paper_cell(fixed(paper.of_donor(method, donor))) for method in methods]
            columns.append((f"{donor}, paper's", papers))
    what = f"score of {variant.found.target or 'the target task'}, percent"
    title = f"Test {what}, after merging with a model of each other task"
    zero = "the target's own model" if any(own.values()) else "the best"
    shades_said = shades_text(scale, 1, zero)
    table = Table.of_columns(columns, title, shades=shades_said, has_errors=True)
    return [table, *_choices(variant, found, donors)]


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
