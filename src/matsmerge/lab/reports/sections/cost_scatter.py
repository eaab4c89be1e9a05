"""What merges cost, in operations and seconds, and what that buys."""

from collections.abc import Callable, Sequence
from statistics import fmean

from matsmerge.lab.experiments.score_tables import mean_and_error
from matsmerge.lab.experiments.suite_results import MergeCost
from matsmerge.lab.reports.chart import Axis, Chart, Series
from matsmerge.lab.reports.document import Block, Cell, Column, Figure, Table
from matsmerge.lab.reports.numbers import fixed, paper_cell, power, seconds
from matsmerge.lab.reports.variant import Variant


def cost_scatter(variant: Variant) -> list[Block]:
    """A point for every method: its cost and its mean test score."""
    found = variant.found.costs
    if not found:
        return []
    scores = variant.mean_scores
    table = _table(found, variant)
    blocks: list[Block] = []
    kinds: list[tuple[str, str, Callable[[MergeCost], float | None]]] = [
        ("Operations against accuracy", "operations", lambda c: c.operations),
        ("Seconds against accuracy", "seconds, statistics included", _total_seconds),
    ]
    for title, unit, value in kinds:
        shown = {c.method: v for c in found if c.method in scores and (v := value(c))}
        if len(shown) < 2:
            continue
        cheapest = min(shown, key=lambda method: shown[method])
        highest = max(shown, key=lambda method: scores[method])
        caption = (
            f"{variant.label(cheapest)} is cheapest, {variant.label(highest)} scores highest; "
            f"{unit} on a logarithmic axis, up and to the left is better."
        )
        names = [variant.label(method) for method in shown]
        means = [scores[method] for method in shown]
        dots = Series(
            "",
            list(shown.values()),
            means,
            titles=[
                f"{name}: {fixed(mean)} at {power(cost)}"
                for name, mean, cost in zip(names, means, shown.values(), strict=True)
            ],
            labels=names,
        )
        chart = Chart(300, Axis(unit, log=True), Axis("score, percent"), [dots])
        blocks.append(Figure(title, caption, chart, half=True))
    return [*blocks, table]


def _total_seconds(cost: MergeCost) -> float | None:
    return fmean(cost.seconds) + (cost.statistics_seconds or 0) if cost.seconds else None


def _table(found: Sequence[MergeCost], variant: Variant) -> Table:
    paper, methods = variant.paper, [cost.method for cost in found]
    merging = [mean_and_error(cost.seconds) if cost.seconds else (None, None) for cost in found]
    columns: list[Column] = [
        ("", [variant.label(method) for method in methods]),
        ("operations", [power(cost.operations) for cost in found]),
        ("merging, seconds", [Cell(seconds(m), seconds(e) if e else "") for m, e in merging]),
        ("all statistics, seconds", [seconds(cost.statistics_seconds) for cost in found]),
        ("together, seconds", [seconds(_total_seconds(cost)) for cost in found]),
    ]
    if paper.operations:
        papers = [paper_cell(power(paper.operations.get(method))) for method in methods]
        columns.insert(2, ("operations, paper's", papers))
        means = (paper.seconds.get(method, (None,))[0] for method in methods)
        columns.append(("together, paper's (A6000)", [paper_cell(seconds(m)) for m in means]))
    title = "Operations by the paper's formulas; seconds are those of this machine"
    return Table.of_columns(columns, title)
