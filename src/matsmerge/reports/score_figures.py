"""Pictures of scores, as plotly draws them: plain dictionaries."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matsmerge.reports.document import Figure, Table
from matsmerge.reports.figure_style import COLORBAR, INK, LEGEND, MUTED, SYMBOLS, colour, plain
from matsmerge.reports.numbers import percent, signed

_ROW = 30  # pixels of a row in a chart of names


@dataclass(frozen=True)
class Dot:
    """A row of a comparison."""

    name: str
    value: float
    error: float | None = None
    is_reference: bool = False
    is_best: bool = False
    paper: float | None = None


def dots(
    title: str,
    caption: str,
    rows: Sequence[Dot],
    line: float | None,
    unit: str,
    show: Callable[[float], str],
    table: Table,
    best: str,
) -> Figure:
    """A dot with its error for every row, the first at the top; `line` stands upright.

    What is far below all else gets an arrow, for it would squeeze the rest.
    """
    places = {row: len(rows) - i for i, row in enumerate(rows)}
    low = lowest_shown([(row.value, row.is_reference) for row in rows])
    inside = [row for row in rows if row.value >= low]
    kinds = [
        (best, "theme:accent", "circle", 13, [r for r in inside if r.is_best]),
        (
            "merges",
            "theme:series-1",
            "circle",
            10,
            [r for r in inside if not r.is_best and not r.is_reference],
        ),
        ("references", MUTED, "diamond", 10, [r for r in inside if r.is_reference]),
    ]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [row.value for row in members],
            "y": [places[row] for row in members],
            "text": [plain(row.name) for row in members],
            "error_x": {
                "array": [row.error or 0.0 for row in members],
                "thickness": 2,
                "width": 5,
                "color": tint,
            },
            "marker": {"size": size, "symbol": symbol, "color": tint},
            "hovertemplate": "%{text}: %{x:.1f}<extra></extra>",
        }
        for name, tint, symbol, size, members in kinds
        if members
    ]
    known = [row for row in rows if row.paper is not None]
    if known:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "the paper's",
                "x": [row.paper for row in known],
                "y": [places[row] for row in known],
                "text": [plain(row.name) for row in known],
                "marker": {"size": 10, "symbol": "square-open", "color": "theme:series-5"},
                "hovertemplate": "%{text}, the paper's: %{x:.1f}<extra></extra>",
            }
        )
    notes = [
        _note(plain(show(row.value)), 1, place, "left", 8, strong=row.is_best)
        for row, place in places.items()
    ]
    notes += [_note("◂", 0, places[row], "left", 2) for row in rows if row.value < low]
    layout = {
        "height": 70 + _ROW * len(rows),
        "margin": {"l": 10, "r": 52, "t": 8, "b": 44},
        "showlegend": True,
        "legend": LEGEND,
        "xaxis": {"title": {"text": unit}, "zeroline": False},
        "yaxis": _names_axis([row.name for row in rows]),
        "shapes": [] if line is None else [_upright(line)],
        "annotations": notes,
    }
    return Figure(title, caption, data, layout, table)


def lowest_shown(scores: Sequence[tuple[float, bool]]) -> float:
    """Where a chart of scores begins: (value, is it a reference). The worst merge is always in."""
    merges = [value for value, is_reference in scores if not is_reference]
    if not merges:
        return -math.inf
    return min(merges) - max(max(value for value, _ in scores) - min(merges), 1e-9)


def dots_by_task(
    title: str,
    caption: str,
    tasks: Sequence[str],
    scores: Mapping[str, Sequence[float | None]],
    best: str,
    references: Sequence[str],
    unit: str,
    table: Table,
) -> Figure:
    """For every task a row with a dot for each model."""
    places = [len(tasks) - i for i in range(len(tasks))]
    data: list[dict[str, Any]] = []
    others = [name for name in scores if name != best and name != "individual"]
    for name, values in scores.items():
        if name == best:
            marker: dict[str, Any] = {"size": 13, "color": "theme:accent", "symbol": "circle"}
        elif name == "individual":
            marker = {"size": 12, "color": INK, "symbol": "diamond-open", "line": {"width": 1.6}}
        else:
            i = others.index(name)
            symbol = "diamond" if name in references else SYMBOLS[1 + i % (len(SYMBOLS) - 1)]
            tint = MUTED if name in references else colour(1 + i)
            marker = {"size": 7, "color": tint, "symbol": symbol}
        shown = [(v, p, t) for v, p, t in zip(values, places, tasks, strict=True) if v is not None]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": plain(name),
                "legendrank": len(data) + (2 if name != best else 1),
                "x": [v for v, _, _ in shown],
                "y": [p for _, p, _ in shown],
                "text": [plain(t) for _, _, t in shown],
                "marker": marker,
                "hovertemplate": "%{text}, " + plain(name) + ": %{x:.1f}<extra></extra>",
            }
        )
    data.sort(key=lambda trace: trace["marker"]["size"])  # the largest is drawn last
    layout = {
        "height": 80 + 34 * len(tasks),
        "margin": {"l": 10, "r": 16, "t": 8, "b": 44},
        "showlegend": True,
        "legend": LEGEND,
        "xaxis": {"title": {"text": unit}, "zeroline": False},
        "yaxis": _names_axis(tasks),
    }
    return Figure(title, caption, data, layout, table)


def gains(
    title: str,
    caption: str,
    rows: Sequence[str],
    columns: Sequence[str],
    scores: Sequence[Sequence[float | None]],
    of_rows: Sequence[float],
    table: Table,
) -> Figure:
    """Scores in cells, coloured by the gain over the row's own score."""
    differences = [
        [None if score is None else 100 * (score - own) for score in row]
        for row, own in zip(scores, of_rows, strict=True)
    ]
    texts = [
        [
            "" if score is None else f"<b>{percent(score)}</b><br>{signed(score - own)}"
            for score in row
        ]
        for row, own in zip(scores, of_rows, strict=True)
    ]
    largest = max((abs(d) for row in differences for d in row if d is not None), default=1.0)
    names = [f"{plain(row)}<br>{percent(own)}" for row, own in zip(rows, of_rows, strict=True)]
    data = {
        "type": "heatmap",
        "name": "gain over the init",
        "x": [plain(column) for column in columns],
        "y": names,
        "z": differences,
        "text": texts,
        "texttemplate": "%{text}",
        "textfont": {"size": 12, "color": INK},
        "zmin": -(largest or 1.0),
        "zmax": largest or 1.0,
        "colorscale": "theme:diverging",
        "colorbar": COLORBAR
        | {"title": {"text": "gain, points", "side": "top", "font": {"size": 12}}},
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": "objective %{x}<br>init %{y}<br>gain %{z:.1f}<extra></extra>",
    }
    layout = {
        "height": 170 + 52 * len(rows),
        "margin": {"l": 10, "r": 10, "t": 40, "b": 10},
        "xaxis": {"title": {"text": "objective"}, "side": "top", "showgrid": False},
        "yaxis": {"autorange": "reversed", "automargin": True, "showgrid": False},
    }
    return Figure(title, caption, [data], layout, table)


def line(
    title: str,
    caption: str,
    xs: Sequence[float],
    ys: Sequence[float],
    best: int,
    labels: tuple[str, str],
    table: Table,
) -> Figure:
    """One value against another, with the one that was chosen."""
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": plain(labels[1]),
            "x": xs,
            "y": ys,
            "line": {"color": "theme:series-1", "width": 2},
            "marker": {"size": 7},
            "hovertemplate": "%{x}: %{y:.2f}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "chosen",
            "x": [xs[best]],
            "y": [ys[best]],
            "marker": {"size": 14, "symbol": "circle-open", "color": "theme:accent"},
            "hovertemplate": "chosen: %{x}<extra></extra>",
        },
    ]
    layout = {
        "height": 320,
        "margin": {"l": 10, "r": 12, "t": 8, "b": 44},
        "showlegend": False,
        "xaxis": {"title": {"text": plain(labels[0])}},
        "yaxis": {"title": {"text": plain(labels[1])}},
    }
    return Figure(title, caption, data, layout, table)


def _names_axis(names: Sequence[str]) -> dict[str, Any]:
    """The first at the top."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names), 0, -1)),
        "ticktext": [plain(name) for name in names],
        "range": [0.4, len(names) + 0.6],
        "automargin": True,
        "zeroline": False,
        "fixedrange": True,
    }


def _upright(x: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "line": {"color": MUTED, "width": 1.5, "dash": "dot"},
    }


def _note(
    text: str, x: float, y: float, anchor: str, shift: int, *, strong: bool = False
) -> dict[str, Any]:
    """Text beside a row, at a share `x` of the width."""
    return {
        "text": f"<b>{text}</b>" if strong else text,
        "showarrow": False,
        "x": x,
        "xref": "paper",
        "xanchor": anchor,
        "xshift": shift,
        "y": y,
        "yanchor": "middle",
    }
