"""Losses in a plane through the models of one layer (figure 1 of the paper)."""

import math
from collections.abc import Sequence

from matsmerge.lab.reports.chart import DASHES, SYMBOLS, Axis, Chart, Series
from matsmerge.lab.reports.contours import level_lines
from matsmerge.lab.reports.document import Block, Figure, Table
from matsmerge.lab.reports.palette import series as colour_of
from matsmerge.lab.reports.variant import Variant

_NUM_LEVELS = 6


def level_sets(variant: Variant) -> list[Block]:
    """Contours of every task's loss, and the models, merges and paths of solvers on the plane."""
    found = variant.found.landscape
    if found is None:
        return []
    series: list[Series] = []
    for i, (task, losses) in enumerate(found.losses.items()):
        levels = _levels(losses)
        lines = [
            line for level in levels for line in level_lines(found.xs, found.ys, losses, level)
        ]
        for j, line in enumerate(lines):
            name = "" if j else f"loss of {task}"
            xs, ys = map(list, zip(*line, strict=True))
            dash = DASHES[i % len(DASHES)]
            series.append(Series(name, xs, ys, colour_of(i), "", 0, 1.3, dash, opacity=0.8))
    for i, (method, path) in enumerate(found.paths.items()):
        name, dash = f"path of {variant.label(method)}", DASHES[i % len(DASHES)]
        xs, ys = [point.x for point in path], [point.y for point in path]
        titles = [f"{name}, iteration {n}" for n in range(len(path))]
        series.append(Series(name, xs, ys, "ink", "circle", 2.5, 1.5, dash, titles=titles))
    for i, merge in enumerate(found.merges):
        name, tint = variant.label(merge.name), colour_of(i + len(found.losses))
        symbol = SYMBOLS[i % len(SYMBOLS)]
        series.append(Series(name, [merge.x], [merge.y], tint, symbol, 6, titles=[name]))
    for i, model in enumerate(found.models):
        tint, names = colour_of(i), [model.name]
        place = [model.x], [model.y]
        series.append(Series("", *place, tint, size=7, titles=names, labels=names))
    x, y = (Axis(low=min(v), high=max(v)) for v in (found.xs, found.ys))
    caption = (
        f"Level sets of each task's loss in a plane of {found.layer}, on held-out examples, all "
        "else as in the task's own model. The merges are those of the plane's two parameters."
    )
    rows = [
        *((model.name, "model", model) for model in found.models),
        *((variant.label(merge.name), "merge", merge) for merge in found.merges),
        *(
            (f"{variant.label(name)}, iteration {i}", "path", point)
            for name, path in found.paths.items()
            for i, point in enumerate(path)
        ),
    ]
    cells = [[name, kind, f"{point.x:.3f}", f"{point.y:.3f}"] for name, kind, point in rows]
    table = Table(["", "kind", "x", "y"], cells, in_markdown=False)
    return [Figure("Losses in a plane", caption, Chart(0, x, y, series, same_scale=True), table)]


def _levels(losses: Sequence[Sequence[float]]) -> list[float]:
    """Up to what more than half of the plane has; even in the root, as a quadratic loss is."""
    numbers = sorted(v for row in losses for v in row if math.isfinite(v)) or [0.0]
    lowest, high = numbers[0], numbers[len(numbers) * 6 // 10]
    return [lowest + (high - lowest) * (i / _NUM_LEVELS) ** 2 for i in range(1, _NUM_LEVELS + 1)]
