"""The figure of `mats inspect --subspace`: spectra, overlaps and distances, side by side."""

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matsmerge.statistics.subspace_view import SubspaceView

# Okabe and Ito's palette, made for all kinds of colour vision.
_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#000000", "#b8a900",
)  # fmt: skip
_LINES = ("-", "--", ":", "-.")
_LABEL_LENGTH = 22
_TITLE_PAD = 22  # room for a legend below it
_FIGURE_SUFFIXES = (".png", ".svg", ".html")


def check_figure(target: Path) -> None:
    """Refuse a figure that cannot be drawn or written, before any work."""
    from matsmerge.errors import OutputError
    from matsmerge.reports.picture import import_matplotlib

    problems = []
    if target.suffix not in _FIGURE_SUFFIXES:
        expected = ", ".join(_FIGURE_SUFFIXES)
        problems.append(f"{target}: a figure's name ends in one of {expected}")
    if target.is_dir():
        problems.append(f"{target}: is a folder, expected the name of a file to write")
    if not target.absolute().parent.is_dir():
        problems.append(f"{target.absolute().parent}: no such folder to write the figure into")
    if problems:
        raise OutputError(problems)
    import_matplotlib("--figure")


def write_figure(view: "SubspaceView", target: Path) -> None:
    """Draw a view as PNG, SVG or a page with it."""
    from matsmerge.errors import OutputError
    from matsmerge.reports.picture import import_matplotlib

    matplotlib = import_matplotlib("--figure")
    drawn = io.BytesIO()
    kind = "png" if target.suffix == ".png" else "svg"
    # Without a date and random identifiers the same view gives the same bytes.
    metadata = {"Date": None} if kind == "svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "matsmerge", "font.size": 9}):
        _draw(view, matplotlib).savefig(drawn, format=kind, dpi=150, metadata=metadata)
    content = drawn.getvalue()
    if target.suffix == ".html":
        picture = content[content.index(b"<svg") :].decode()
        head = '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        content = f"{head}<title>Task parameter subspaces</title>\n{picture}</html>\n".encode()
    try:
        target.write_bytes(content)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written ({error.strerror})") from error


def _draw(view: "SubspaceView", matplotlib: Any) -> Any:
    """Spectra, overlaps and distances, side by side."""
    num = len(view.tasks)
    panels = [_draw_spectra]
    panels += [_draw_overlaps] if num > 1 else []
    panels += [_draw_distances] if view.relative_to is not None else []
    height = max(3.8, 2.2 + 0.36 * num)
    figure = matplotlib.figure.Figure(figsize=(4.6 * len(panels), height), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, view)
    return figure


def _draw_spectra(axes: Any, view: "SubspaceView") -> None:
    """Each task's eigenvalues: a thin line for every layer, and their median."""
    import torch

    widest = max(layer.dim for layer in view.layers)
    for i, name in enumerate(view.tasks):
        # A layer has nothing in directions beyond its own, so the median has no jumps there.
        shares = torch.zeros(len(view.layers), widest, dtype=torch.float64)
        for row, layer in zip(shares, view.layers, strict=True):
            values = layer.spectra[i].eigenvalues
            row[: layer.dim] = values / values.sum()
        middle = shares.quantile(0.5, 0)
        shares[shares == 0] = middle[middle == 0] = math.nan  # no place on a logarithmic scale
        index = range(1, widest + 1)
        style, colour = _LINES[i // len(_COLOURS) % len(_LINES)], _COLOURS[i % len(_COLOURS)]
        axes.plot(index, shares.mT.numpy(), style, color=colour, alpha=0.3, linewidth=0.6)
        axes.plot(index, middle.numpy(), style, color=colour, linewidth=1.8, label=_short(name))
    axes.set(xscale="log", yscale="log", xlabel="direction", ylabel="share of the trace")
    axes.set_title(f"Spectra of {len(view.layers)} layers, and their median", pad=_TITLE_PAD)
    axes.legend(edgecolor="none", fontsize=8, loc="lower left")


def _draw_overlaps(axes: Any, view: "SubspaceView") -> None:
    from matsmerge.cli.display import number
    from matsmerge.statistics.subspace_view import mean

    num = range(len(view.tasks))
    values = [[view.overlap(a, b) for b in num] for a in num]
    axes.imshow(values, vmin=0, vmax=1, cmap="viridis")
    for a in num:
        for b in num:
            ink = "white" if values[a][b] < 0.5 else "black"
            text = number(values[a][b])
            axes.text(b, a, text, ha="center", va="center", color=ink, fontsize=8)
    names = [_short(name) for name in view.tasks]
    axes.set_xticks(num, names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(num, names)
    expected = mean(view.overlap_at_random(a, b) for a in num for b in num if a != b)
    axes.set_title(f"Overlap of subspaces (at random {number(expected)})", pad=_TITLE_PAD)


def _draw_distances(axes: Any, view: "SubspaceView") -> None:
    places = range(len(view.tasks))
    means = [view.mean_distance(i) for i in places]
    for key, shift, colour in (("inside", -0.2, _COLOURS[0]), ("outside", 0.2, _COLOURS[1])):
        where = [place + shift for place in places]
        bars = axes.barh(where, [m[key] for m in means], 0.38, color=colour, label=key)
        axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=7)
    expected = [m["inside_at_random"] for m in means]
    label = "inside, at random"
    axes.vlines(expected, [p - 0.4 for p in places], places, color="black", lw=1.5, label=label)
    axes.set_yticks(places, [_short(name) for name in view.tasks])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    size = r"$|W - W_\mathrm{base}|$" if view.relative_to == "base" else "$|W|$"
    axes.set_xlabel(f"distance of the merged weights, in {size}")
    axes.set_title("Inside and outside of the subspace", pad=_TITLE_PAD)
    # Above the bars, which leave it no room, and below the title.
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.98), "ncols": 3}
    marks, *bars = zip(*axes.get_legend_handles_labels(), strict=True)
    axes.legend(*zip(*bars, marks, strict=True), frameon=False, fontsize=8, **above)


def _short(name: str) -> str:
    return name if len(name) <= _LABEL_LENGTH else f"{name[: _LABEL_LENGTH - 1]}…"
