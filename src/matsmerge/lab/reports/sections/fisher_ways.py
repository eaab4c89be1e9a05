"""Scores with the Fisher information taken one of four ways: empirical or true, by split."""

from statistics import fmean

from matsmerge.lab.reports.document import Block, Cell, Table
from matsmerge.lab.reports.numbers import fixed, grouped, mean_of, paper_cell, score_cell
from matsmerge.lab.reports.variant import Variant


def fisher_ways(variant: Variant) -> list[Block]:
    """A table with a row for each way, the paper's scores beside ours."""
    paper = variant.paper
    found = grouped(((s.method, s.expectation, s.split), s.score) for s in variant.found.fisher)
    if not found:
        return []
    methods = list(dict.fromkeys(method for method, _, _ in found))
    has_paper = any(method in paper.fisher for method in methods)
    best = {m: max(fmean(values) for key, values in found.items() if key[0] == m) for m in methods}
    heads = ["Fisher information", "from split"]
    for name in map(variant.label, methods):
        heads += [name, f"{name}, paper's"] if has_paper else [name]
    rows: list[list[Cell | str]] = []
    for expectation, split in dict.fromkeys(key[1:] for key in found):
        row: list[Cell | str] = [expectation, split]
        for method in methods:
            values = found.get((method, expectation, split), [])
            row.append(score_cell(values, best=mean_of(values) == best[method]))
            if has_paper:
                row.append(paper_cell(fixed(paper.of_fisher(method, expectation, split))))
        rows.append(row)
    return [Table(heads, rows, "Mean validation score over tasks, percent")]
