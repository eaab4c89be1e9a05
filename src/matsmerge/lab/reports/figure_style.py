"""What all figures share: plotly, colours, symbols and a template.

A figure is a plotly figure in light colours, as pictures have it. A page in the dark theme replaces
each light colour by its dark one.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from matsmerge.optional_import import import_optional

go = import_optional("plotly.graph_objects")

# By name: on light and on dark. Series colours are told apart with any kind of colour vision
# (after Okabe and Ito).
COLOURS = {
    "page": ("#f6f6f3", "#14171a"),
    "surface": ("#ffffff", "#1c2024"),
    "ink": ("#1d2329", "#e7e9ea"),
    "muted": ("#626b75", "#9aa3ab"),
    "line": ("#d5d8da", "#3a4147"),
    "grid": ("#eceeee", "#2b3136"),
    "accent": ("#b4460a", "#f59b51"),
    "link": ("#075e9c", "#7cc0f2"),
    "focus": ("#0b6fb8", "#7cc0f2"),
    "warn": ("#fdf1d8", "#3a2f15"),
    "series-1": ("#0a6fb0", "#5badec"),
    "series-2": ("#d08700", "#f0b13c"),
    "series-3": ("#008a64", "#32bf95"),
    "series-4": ("#c24e00", "#f08a4b"),
    "series-5": ("#a8588f", "#d990c0"),
    "series-6": ("#3b9fd6", "#9ad3f5"),
    "series-7": ("#6b7079", "#a4abb3"),
    "series-8": ("#958400", "#cdbd3f"),
    "worse": ("#e3a15c", "#8f5a1d"),
    "middle": ("#f5f5f2", "#272c31"),
    "better": ("#78b2de", "#2a6a9f"),
    "low": ("#f1f5f8", "#22292f"),
    "high": ("#6fabd8", "#2d6fa5"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
SURFACE, INK, MUTED, ACCENT = (LIGHT[name] for name in ("surface", "ink", "muted", "accent"))
SERIES = [light for name, light in LIGHT.items() if name.startswith("series")]
PAPERS = LIGHT["series-5"]
DIVERGING = [[0, LIGHT["worse"]], [0.5, LIGHT["middle"]], [1, LIGHT["better"]]]
SEQUENTIAL = [[0, LIGHT["low"]], [1, LIGHT["high"]]]
FONT = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', Arial, sans-serif"
)
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross", "star", "x", "triangle-down")
# Powers are drawn larger than other numbers; the smaller font evens that out.
LOG = {"type": "log", "exponentformat": "power", "tickfont": {"size": 10.5}}

_AXIS = {
    **dict.fromkeys(("linecolor", "zerolinecolor", "tickcolor"), LIGHT["line"]),
    **dict.fromkeys(("showline", "showgrid", "zeroline", "automargin"), True),
    "gridcolor": LIGHT["grid"],
    "ticks": "outside",
    "title": {"standoff": 10, "font": {"size": 13, "color": MUTED}},
}
TEMPLATE = go.layout.Template(
    layout={
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "margin": {"l": 10, "r": 12, "t": 8, "b": 44},
        "showlegend": False,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"},
        "paper_bgcolor": SURFACE,
        "plot_bgcolor": SURFACE,
        "font": {"family": FONT, "size": 13, "color": INK},
        "hoverlabel": {
            "bgcolor": LIGHT["page"],
            "bordercolor": LIGHT["line"],
            "font": {"color": INK},
        },
        "hovermode": "closest",
        "dragmode": False,
    },
    data={
        "heatmap": [
            {
                "textfont": {"size": 12, "color": INK},
                "xgap": 2,
                "ygap": 2,
                "colorbar": {
                    "orientation": "h",
                    "thickness": 10,
                    "len": 0.6,
                    "y": -0.04,
                    "yanchor": "top",
                    "outlinewidth": 0,
                },
            }
        ]
    },
)


def plot(
    height: int, traces: Sequence[Any] = (), *, x: Any = None, y: Any = None, **layout: Any
) -> Any:
    """A figure of the template; `x` and `y` are the axes' options, or their titles."""
    axes = {"xaxis": x or {}, "yaxis": y or {}}
    axes = {key: {"title": v} if isinstance(v, str) else v for key, v in axes.items()}
    return go.Figure(traces, {"template": TEMPLATE, "height": height, **axes, **layout})


def points(
    name: str, xs: Iterable[Any], ys: Iterable[Any], hover: str, mode: str = "markers", **more: Any
) -> Any:
    """Points or lines; `hover` is what is said of one, in plotly's notation."""
    hover = hover if "<extra>" in hover else f"{hover}<extra></extra>"
    what = {"name": plain(name), "mode": mode, "hovertemplate": hover}
    return go.Scatter(x=list(xs), y=list(ys), **what, **more)


def colour(index: int) -> str:
    return SERIES[index % len(SERIES)]


def series(index: int, errors: Sequence[float | None] = ()) -> dict[str, Any]:
    """A line with points and the errors of these, in percent, as one of several."""
    bars: dict[str, Any] = {
        "array": [100 * (error or 0.0) for error in errors],
        "thickness": 1,
        "width": 0,
    }
    return {
        "mode": "lines+markers",
        "legendgroup": str(index),
        "line": {"color": colour(index), "width": 2, "dash": dash(index // 8)},
        "marker": {"size": 6, "symbol": symbol(index)},
        **({"error_y": bars} if any(bars["array"]) else {}),
    }


def dash(index: int) -> str:
    return DASHES[index % len(DASHES)]


def symbol(index: int) -> str:
    return SYMBOLS[index % len(SYMBOLS)]


def names_axis(names: Sequence[str]) -> dict[str, object]:
    """A y axis with a name at each of 1, 2, ..., the first at the top."""
    return {
        "tickvals": list(range(len(names), 0, -1)),
        "ticktext": [plain(name) for name in names],
        "range": [0.4, len(names) + 0.6],
        "zeroline": False,
        "fixedrange": True,
    }


def plain(text: str) -> str:
    """A name in a figure: plotly takes some HTML, which names must not be."""
    return escape(text, quote=False)
