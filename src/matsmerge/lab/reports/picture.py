"""Figures as PNG or SVG, drawn by the browser that is installed: the same figures as on pages."""

import re
from collections.abc import Mapping
from typing import Any

from matsmerge.errors import OutputError
from matsmerge.lab.reports.figure_style import MUTED, TEMPLATE, go, plain
from matsmerge.optional_import import import_optional

SUFFIXES = (".png", ".svg")
_WIDTH, _PANEL = 700, 460  # pixels, of which a PNG has two by two: alone, and side by side
_MOST_ABOVE = 4  # names of a legend above a panel
_ABOVE, _BESIDE = 50, 110  # pixels above a panel, for its title and legend, and beside it


def check_picture() -> None:
    """Refuse to begin without kaleido and a browser."""
    import_optional("kaleido")
    if not import_optional("choreographer.browsers.chromium").Chromium.find_browser(
        skip_local=False
    ):
        raise OutputError(
            "a picture is drawn by Chrome or Chromium, and none was found; install one (Debian: "
            "chromium), run `kaleido_get_chrome`, or name one in the environment as BROWSER_PATH"
        )


def draw(plot: go.Figure, suffix: str) -> bytes:
    """The bytes of a .png or .svg file."""
    kaleido = import_optional("kaleido")
    size = {"width": plot.layout.width or _WIDTH, "height": plot.layout.height}
    for i, trace in enumerate(plot.data):
        trace.uid = f"trace{i}"  # else one by chance
    options = {"format": suffix[1:], "scale": 2 if suffix == ".png" else 1, **size}
    # Without MathJax, which kaleido would fetch from the network.
    page = kaleido.PageGenerator(mathjax=False)
    try:
        drawn = kaleido.calc_fig_sync(plot, options, kopts={"page_generator": page})
    except Exception as error:  # of kaleido, choreographer or the browser
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise OutputError(f"the browser did not draw a picture ({reason}); try again") from error
    assert isinstance(drawn, bytes)
    return _without_chance(drawn) if suffix == ".svg" else drawn


def _without_chance(svg: bytes) -> bytes:
    """Identifiers by chance replaced, so that the same figure has the same bytes each time."""
    found = re.search(rb'id="defs-([0-9a-f]{6})"', svg)
    return svg if found is None else svg.replace(found[1], b"figure")


def panels(plots: Mapping[str, Any], *, side_by_side: bool = False) -> go.Figure:
    """One figure of several with their titles: side by side, or one below the other on one x axis.

    Each has one pair of axes. A name that a legend has already is not repeated.
    """
    if len(plots) == 1:
        return next(iter(plots.values()))
    num = len(plots)
    heights = [plot.layout.height for plot in plots.values()]
    width = _PANEL * num if side_by_side else _WIDTH
    height = _ABOVE + (max(heights) if side_by_side else sum(heights))
    whole = import_optional("plotly.subplots").make_subplots(
        **({"cols": num} if side_by_side else {"rows": num, "row_heights": heights}),
        shared_xaxes=not side_by_side,
        horizontal_spacing=_BESIDE / width,
        vertical_spacing=_ABOVE / height,
        subplot_titles=[plain(title) for title in plots],
        figure=go.Figure(layout={"template": TEMPLATE, "showlegend": True}),
    )
    whole.update_layout(width=width, height=height, margin={"r": 52, "t": _ABOVE})
    named: set[str] = set()
    for i, plot in enumerate(plots.values()):
        place = {"row": 1, "col": i + 1} if side_by_side else {"row": i + 1, "col": 1}
        axes, legend = whole.get_subplot(**place), f"legend{i + 1 if i else ''}"
        axes.xaxis.update({**plot.layout.xaxis.to_plotly_json(), "side": "bottom"})
        axes.yaxis.update(plot.layout.yaxis.to_plotly_json())
        if not side_by_side and i < num - 1:
            axes.xaxis.title = None
        new: set[str] = set()
        for trace in plot.data:
            is_named = plot.layout.showlegend and trace.showlegend is not False
            new |= {trace.name} - named if is_named else set()
            whole.add_trace(trace, **place)
            whole.data[-1].update(legend=legend, showlegend=is_named and trace.name in new)
        named |= new
        corner = {"x": axes.xaxis.domain[0], "y": axes.yaxis.domain[1], "xanchor": "left"}
        whole.layout[legend] = {**TEMPLATE.layout.legend.to_plotly_json(), **corner}
        if side_by_side and len(new) > _MOST_ABOVE:  # inside, for it would reach into the next one
            inside = {"orientation": "v", "y": axes.yaxis.domain[0], "bgcolor": "rgba(0,0,0,0)"}
            whole.layout[legend].update(inside)
        look = {
            "yshift": 26 if 0 < len(new) <= _MOST_ABOVE else 4,
            "font": {"size": 14, "color": MUTED},
        }
        whole.layout.annotations[i].update(**corner, **look)
        for note in plot.layout.annotations:
            whole.add_annotation(note, **place)
        for shape in plot.layout.shapes:
            whole.add_shape(shape, **place)
    whole.update_traces(showscale=False, selector={"type": "heatmap"})  # cells have their numbers
    return whole
