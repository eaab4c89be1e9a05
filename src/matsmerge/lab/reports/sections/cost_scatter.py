"""What merges cost, in operations and seconds, and what that buys."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from matsmerge.lab.experiments.score_tables import mean_and_error
from matsmerge.lab.experiments.suite_results import Cost
from matsmerge.lab.reports import figure_style as style
from matsmerge.lab.reports.document import Block, Cell, Column, Figure, Table
from matsmerge.lab.reports.numbers import paper_cell, power, seconds
from matsmerge.lab.reports.variant import Variant


def cost_scatter(variant: Variant) -> list[Block]:
    """A point for every method: its cost and its mean test score."""
    found = variant.found.costs
    if not found:
        return []
    scores = variant.mean_scores
    table = _table(found, variant)
    blocks: list[Block] = []
    kinds: list[tuple[str, str, Callable[[Cost], float | None]]] = [
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
        plot = _plot(names, list(shown.values()), [scores[method] for method in shown], unit)
        blocks.append(Figure(title, caption, plot, table, half=True))
    return [*blocks, table]


def _total_seconds(cost: Cost) -> float | None:
    return fmean(cost.seconds) + (cost.statistics_seconds or 0) if cost.seconds else None


def _table(found: Sequence[Cost], variant: Variant) -> Table:
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


def _plot(names: Sequence[str], costs: Sequence[float], scores: Sequence[float], unit: str) -> Any:
    low, high = math.log10(min(costs)), math.log10(max(costs))
    room = max(0.5, 0.35 * (high - low))
    dots = style.points(
        "methods",
        costs,
        (100 * score for score in scores),
        "%{text}: %{y:.1f} at %{x:.2~s}",
        "markers+text",
        text=[style.plain(name) for name in names],
        textposition=_sides(names, costs, scores),
        cliponaxis=False,
        marker={"size": 11, "color": style.colour(0)},
        textfont={"size": 12, "color": style.INK},
    )
    axis = {"title": unit, "range": [low - room, high + room], **style.LOG}
    return style.plot(340, [dots], x=axis, y="score, percent", margin={"t": 12})


def _sides(names: Sequence[str], costs: Sequence[float], scores: Sequence[float]) -> list[str]:
    """On which side of its point each name covers least of the others; in pixels, roughly."""
    xs = _spread([math.log10(cost) for cost in costs], 180)
    ys = _spread(scores, 220)
    taken = [(x - 7, x + 7, y - 7, y + 7) for x, y in zip(xs, ys, strict=True)]
    sides = []
    for name, x, y in zip(names, xs, ys, strict=True):
        width, height = 7.0 * len(name), 15.0
        boxes = {
            "top center": (x - width / 2, x + width / 2, y + 8, y + 8 + height),
            "bottom center": (x - width / 2, x + width / 2, y - 8 - height, y - 8),
            "middle right": (x + 9, x + 9 + width, y - height / 2, y + height / 2),
            "middle left": (x - 9 - width, x - 9, y - height / 2, y + height / 2),
        }
        side = min(boxes, key=lambda s: sum(_common(boxes[s], other) for other in taken))
        taken.append(boxes[side])
        sides.append(side)
    return sides


_Box = tuple[float, float, float, float]  # left, right, bottom, top


def _common(a: _Box, b: _Box) -> float:
    """The area two boxes share."""
    width = min(a[1], b[1]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[2], b[2])
    return max(width, 0.0) * max(height, 0.0)


def _spread(values: Sequence[float], size: float) -> list[float]:
    low, high = min(values), max(values)
    return [size * (value - low) / ((high - low) or 1.0) for value in values]
