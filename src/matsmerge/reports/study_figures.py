"""Pictures of what a suite's studies found, as plotly draws them: plain dictionaries."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matsmerge.reports.document import Figure, Table
from matsmerge.reports.figure_style import (
    COLORBAR,
    DASHES,
    INK,
    LEGEND,
    LOG,
    NUM_COLOURS,
    SYMBOLS,
    colour,
    plain,
)


def overlaps(
    title: str, caption: str, tasks: Sequence[str], values: Sequence[Sequence[Any]], table: Table
) -> Figure:
    """How far subspaces overlap, task by task."""
    names = [plain(task) for task in tasks]
    data = {
        "type": "heatmap",
        "name": "overlap",
        "x": names,
        "y": names,
        "z": values,
        "texttemplate": "%{z:.2f}",
        "textfont": {"size": 12, "color": INK},
        "zmin": 0,
        "zmax": 1,
        "colorscale": "theme:sequential",
        "colorbar": COLORBAR,
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": "%{y} and %{x}: %{z:.3f}<extra></extra>",
    }
    layout = {
        "height": 150 + 38 * len(tasks),
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "xaxis": {"side": "top", "showgrid": False, "automargin": True},
        "yaxis": {"autorange": "reversed", "automargin": True, "showgrid": False},
    }
    return Figure(title, caption, [data], layout, table)


def curves(
    title: str,
    caption: str,
    series: Mapping[str, Sequence[tuple[int, float, float | None, float]]],
    table: Table,
) -> Figure:
    """Scores above, residuals below, against iterations: (iterations, score, error, residual)."""
    data: list[dict[str, Any]] = []
    for i, (name, points) in enumerate(series.items()):
        shared: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines+markers",
            "legendgroup": str(i),
            "x": [point[0] for point in points],
            "line": {"color": colour(i), "width": 2, "dash": DASHES[i // NUM_COLOURS % 4]},
            "marker": {"size": 6, "symbol": SYMBOLS[i % len(SYMBOLS)]},
        }
        errors = [100 * (point[2] or 0.0) for point in points]
        data += [
            shared
            | {
                "name": plain(name),
                "y": [100 * point[1] for point in points],
                **(
                    {"error_y": {"array": errors, "thickness": 1, "width": 0}}
                    if any(errors)
                    else {}
                ),
                "hovertemplate": "%{x} iterations: %{y:.1f}<extra>" + plain(name) + "</extra>",
            },
            shared
            | {
                "name": f"{plain(name)}, residual",
                "showlegend": False,
                "y": [point[3] for point in points],
                "yaxis": "y2",
                "hovertemplate": "%{x} iterations: %{y:.2e}<extra>" + plain(name) + "</extra>",
            },
        ]
    layout = {
        "height": 470,
        "margin": {"l": 10, "r": 12, "t": 8, "b": 44},
        "legend": LEGEND,
        "showlegend": True,
        "xaxis": {"title": {"text": "iterations"}, "anchor": "y2", "type": "log"},
        "yaxis": {"title": {"text": "score, percent"}, "domain": [0.47, 1]},
        "yaxis2": {"title": {"text": "residual"}, "domain": [0, 0.4], **LOG},
    }
    return Figure(title, caption, data, layout, table, log_x=True)


def cost_against_score(
    title: str,
    caption: str,
    names: Sequence[str],
    costs: Sequence[float],
    scores: Sequence[float],
    unit: str,
    table: Table,
) -> Figure:
    """A point for every method; up and to the left is better."""
    data = {
        "type": "scatter",
        "mode": "markers+text",
        "name": "methods",
        "x": costs,
        "y": [100 * score for score in scores],
        "text": [plain(name) for name in names],
        "textposition": _sides(names, costs, scores),
        "cliponaxis": False,
        "marker": {"size": 11, "color": "theme:series-1"},
        "textfont": {"size": 12, "color": INK},
        "hovertemplate": "%{text}: %{y:.1f} at %{x:.2~s}<extra></extra>",
    }
    low, high = math.log10(min(costs)), math.log10(max(costs))
    room = max(0.5, 0.35 * (high - low))
    layout = {
        "height": 340,
        "margin": {"l": 10, "r": 12, "t": 12, "b": 44},
        "xaxis": {"title": {"text": unit}, "range": [low - room, high + room], **LOG},
        "yaxis": {"title": {"text": "score, percent"}, "automargin": True},
    }
    return Figure(title, caption, [data], layout, table, half=True)


def level_sets(
    title: str,
    caption: str,
    xs: Sequence[float],
    ys: Sequence[float],
    losses: Mapping[str, Sequence[Sequence[float]]],
    models: Sequence[tuple[str, float, float]],
    merges: Sequence[tuple[str, float, float]],
    paths: Mapping[str, Sequence[tuple[float, float]]],
    table: Table,
) -> Figure:
    """Contours of every task's loss in a plane, and what lies on it."""
    data: list[dict[str, Any]] = []
    for i, (task, values) in enumerate(losses.items()):
        lowest = min(v for row in values for v in row)
        # Levels of the root are even where a loss is quadratic; the level sets are the same.
        roots = [[math.sqrt(v - lowest) for v in row] for row in values]
        steps = sorted(v for row in roots for v in row)
        size = (steps[len(steps) * 6 // 10] or 1.0) / 6
        data.append(
            {
                "type": "contour",
                "name": f"loss of {plain(task)}",
                "x": xs,
                "y": ys,
                "z": roots,
                "customdata": values,
                "autocontour": False,
                "contours": {"coloring": "lines", "start": size, "end": 6 * size, "size": size},
                "colorscale": [[0, colour(i)], [1, colour(i)]],
                "line": {"width": 1.4, "smoothing": 0.8, "dash": DASHES[i % 4]},
                "opacity": 0.8,
                "showscale": False,
                "showlegend": True,
                "hovertemplate": f"loss of {plain(task)}: " + "%{customdata:.3g}<extra></extra>",
            }
        )
    for i, (name, path) in enumerate(paths.items()):
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"path of {plain(name)}",
                "x": [x for x, _ in path],
                "y": [y for _, y in path],
                "line": {"color": INK, "width": 1.5, "dash": DASHES[i % 4]},
                "marker": {"size": 4, "color": INK},
                "hovertemplate": "%{x:.2f}, %{y:.2f}<extra>" + plain(name) + "</extra>",
            }
        )
    for i, (name, x, y) in enumerate(merges):
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": plain(name),
                "x": [x],
                "y": [y],
                "marker": {
                    "size": 11,
                    "symbol": SYMBOLS[i % len(SYMBOLS)],
                    "color": colour(i + len(losses)),
                    "line": {"width": 1, "color": "theme:surface"},
                },
                "hovertemplate": "%{x:.2f}, %{y:.2f}<extra>" + plain(name) + "</extra>",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "models",
            "showlegend": False,
            "x": [x for _, x, _ in models],
            "y": [y for _, _, y in models],
            "text": [f"<b>{plain(name)}</b>" for name, _, _ in models],
            "textposition": "top center",
            "cliponaxis": False,
            "marker": {
                "size": 13,
                "color": [colour(i) for i in range(len(models))],
                "line": {"width": 2, "color": "theme:surface"},
            },
            "hovertemplate": "%{text}<extra></extra>",
        }
    )
    layout = {
        "height": 600,
        "margin": {"l": 10, "r": 12, "t": 12, "b": 36},
        "showlegend": True,
        "legend": LEGEND,
        "xaxis": {"zeroline": False, "showgrid": False, "constrain": "domain"},
        "yaxis": {"zeroline": False, "showgrid": False, "scaleanchor": "x", "constrain": "domain"},
    }
    return Figure(title, caption, data, layout, table)


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
