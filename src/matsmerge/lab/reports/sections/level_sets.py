"""Losses in a plane through the models of one layer (figure 1 of the paper)."""

import math
from typing import Any

from matsmerge.lab.reports import figure_style as style
from matsmerge.lab.reports.document import Block, Figure, Table
from matsmerge.lab.reports.variant import Variant

_PLACE = "%{x:.2f}, %{y:.2f}"


def level_sets(variant: Variant) -> list[Block]:
    """Contours of every task's loss, and the models, merges and paths of solvers on the plane."""
    found = variant.found.landscape
    if found is None:
        return []
    axis = {"zeroline": False, "showgrid": False, "constrain": "domain"}
    plot = style.plot(
        600,
        x=axis,
        y={**axis, "scaleanchor": "x"},
        margin={"t": 12, "b": 36},
        showlegend=True,
    )
    for i, (task, losses) in enumerate(found.losses.items()):
        numbers = sorted(v for row in losses for v in row if math.isfinite(v)) or [0.0]
        lowest, high = numbers[0], numbers[len(numbers) * 6 // 10]
        # Levels of the root are even where a loss is quadratic; the level sets are the same.
        roots = [[math.sqrt(v - lowest) if math.isfinite(v) else None for v in r] for r in losses]
        size = (math.sqrt(high - lowest) or 1.0) / 6
        plot.add_contour(
            name=f"loss of {style.plain(task)}",
            x=found.xs,
            y=found.ys,
            z=roots,
            customdata=losses,
            autocontour=False,
            contours={"coloring": "lines", "start": size, "end": 6 * size, "size": size},
            colorscale=[[0, style.colour(i)], [1, style.colour(i)]],
            line={"width": 1.4, "smoothing": 0.8, "dash": style.dash(i)},
            opacity=0.8,
            showscale=False,
            showlegend=True,
            hovertemplate=f"loss of {style.plain(task)}: " + "%{customdata:.3g}<extra></extra>",
        )
    for i, (method, path) in enumerate(found.paths.items()):
        name = variant.label(method)
        look: Any = {"line": {"color": style.INK, "width": 1.5, "dash": style.dash(i)}}
        look["marker"] = {"size": 4, "color": style.INK}
        xs, ys = [point.x for point in path], [point.y for point in path]
        hover = f"{_PLACE}<extra>{style.plain(name)}</extra>"
        plot.add_trace(style.points(f"path of {name}", xs, ys, hover, "lines+markers", **look))
    edge = {"width": 1, "color": style.SURFACE}
    for i, merge in enumerate(found.merges):
        name, tint = variant.label(merge.name), style.colour(i + len(found.losses))
        marker = {"size": 11, "symbol": style.symbol(i), "color": tint, "line": edge}
        hover = f"{_PLACE}<extra>{style.plain(name)}</extra>"
        plot.add_trace(style.points(name, [merge.x], [merge.y], hover, marker=marker))
    plot.add_trace(
        style.points(
            "models",
            (model.x for model in found.models),
            (model.y for model in found.models),
            "%{text}",
            "markers+text",
            showlegend=False,
            text=[f"<b>{style.plain(model.name)}</b>" for model in found.models],
            textposition="top center",
            cliponaxis=False,
            marker={
                "size": 13,
                "color": [style.colour(i) for i in range(len(found.models))],
                "line": {"width": 2, "color": style.SURFACE},
            },
        )
    )
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
    return [Figure("Losses in a plane", caption, plot, table)]
