"""What figures share: colours by the page's theme, symbols, axes, and how names are written."""

from typing import Any

INK, MUTED = "theme:ink", "theme:muted"
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross", "star", "x", "triangle-down")
NUM_COLOURS = 8
# Powers are drawn larger than other numbers; the smaller font evens that out.
LOG: dict[str, Any] = {"type": "log", "exponentformat": "power", "tickfont": {"size": 10.5}}
LEGEND: dict[str, Any] = {
    "orientation": "h",
    "x": 0,
    "xanchor": "left",
    "y": 1,
    "yanchor": "bottom",
}
COLORBAR: dict[str, Any] = {
    "orientation": "h",
    "thickness": 10,
    "len": 0.6,
    "y": -0.04,
    "yanchor": "top",
    "outlinewidth": 0,
}


def colour(index: int) -> str:
    return f"theme:series-{index % NUM_COLOURS + 1}"


def plain(text: str) -> str:
    """A name in a figure: plotly takes some HTML, which names must not be."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
