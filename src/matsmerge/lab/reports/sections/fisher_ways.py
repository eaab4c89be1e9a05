"""Scores with the Fisher information taken one of four ways: empirical or true, by split."""

from matsmerge.lab.experiments.score_tables import grouped
from matsmerge.lab.reports.document import Block, Column, Table
from matsmerge.lab.reports.numbers import fixed, paper_cell
from matsmerge.lab.reports.scores import ShownScore, score_cells
from matsmerge.lab.reports.variant import Variant


def fisher_ways(variant: Variant) -> list[Block]:
    """A table with a row for each way, the paper's scores beside ours."""
    paper = variant.paper
    found = grouped(((s.method, s.expectation, s.split), s.score) for s in variant.found.fisher)
    if not found:
        return []
    methods = list(dict.fromkeys(method for method, _, _ in found))
    ways = list(dict.fromkeys((expectation, split) for _, expectation, split in found))
    expectations, splits = zip(*ways, strict=True)
    columns: list[Column] = [("Fisher information", expectations), ("from split", splits)]
    for method in methods:
        name = variant.label(method)
        scores = [ShownScore.over_seeds(found.get((method, *way), [])) for way in ways]
        columns.append((name, score_cells(scores, [True] * len(ways))))
        if any(method in paper.fisher for method in methods):
            papers = [paper_cell(fixed(paper.of_fisher(method, *way))) for way in ways]
            columns.append((f"{name}, paper's", papers))
    return [Table.of_columns(columns, "Mean validation score over tasks, percent")]
