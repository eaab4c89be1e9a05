"""Subspaces of tasks: their spectra, how far they overlap, and where a merge lies in them."""

from collections.abc import Mapping
from typing import Any

from matsmerge.lab.reports.chart import DASHES, Axis, Chart, Series
from matsmerge.lab.reports.document import Block, Cell, Figure, Paragraph, Table
from matsmerge.lab.reports.numbers import NOTHING, fixed, percent
from matsmerge.lab.reports.palette import series as colour_of
from matsmerge.lab.subspaces.subspace_findings import SubspaceView, without_nan

_NUM_POINTS = 80  # of a curve


def overlap_blocks(found: Mapping[str, Any] | None) -> list[Block]:
    """Overlaps and distances, from the summary of a view."""
    if not found:
        return []
    overlaps = overlap_table(found) if len(found["tasks"]) > 1 else []
    distances = [_distance_table(found)] if found.get("distances") else []
    return [*overlaps, *distances]


def view_blocks(view: SubspaceView) -> dict[str, list[Block]]:
    """What there is to see of a view: spectra, overlaps of several tasks, distances of a merge."""
    blocks: dict[str, list[Block]] = {"Spectra": [_spectrum_figure(view)]}
    if len(view.tasks) > 1:
        blocks["Overlap of subspaces"] = overlap_table(view.summary())
    if view.relative_to is not None:
        blocks["Inside and outside of the subspace"] = [_distance_figure(view)]
    return blocks


def overlap_table(found: Mapping[str, Any]) -> list[Block]:
    """The overlaps of every two tasks, coloured; and which two share most."""
    tasks = [str(task["name"]) for task in found["tasks"]]
    values, expected = without_nan([found["overlap"], found["overlap_at_random"]])
    pairs = [(a, b) for a in range(len(tasks)) for b in range(a) if values[a][b] is not None]
    rank, energy = found.get("rank"), found.get("energy")
    size = f"{rank} directions" if rank else f"{energy:.0%} of the trace"
    rows: list[list[Cell | str]] = [
        [
            task,
            *(
                NOTHING if value is None else Cell(fixed(value, 2), shade=min(max(value, 0), 1))
                for value in row
            ),
        ]
        for task, row in zip(tasks, values, strict=True)
    ]
    title = f"Overlap of subspaces ({size} of each layer's inputs), mean over layers"
    shades = ["", "0: nothing shared", "1: the same subspace"]
    blocks: list[Block] = [Table(["", *tasks], rows, title, shades=shades)]
    if pairs:
        a, b = max(pairs, key=lambda pair: values[pair[0]][pair[1]] or 0.0)
        said = f"{tasks[b]} and {tasks[a]} share most, {values[a][b]:.2f}"
        said += f" ({expected[a][b]:.2f} at random)." if expected[a][b] is not None else "."
        blocks.append(Paragraph(said))
    return blocks


def _distance_table(found: Mapping[str, Any]) -> Table:
    shares = ("inside_share", "inside_share_at_random", "at_outputs")
    rows = [
        [
            name,
            *(fixed(means.get(key), 2) for key in ("inside", "outside")),
            *(f"{percent(means.get(key))} %" for key in shares),
        ]
        for name, means in found["distances"].items()
    ]
    heads = ["", "inside", "outside", "share inside", "at random", "change of outputs"]
    size = "|W − W_base|" if found.get("relative_to") == "base" else "|W|"
    title = f"How far the merge is from each model, in and out of its subspace, in {size}"
    return Table(heads, rows, title)


def _spectrum_figure(view: SubspaceView) -> Figure:
    """Each task's eigenvalues: the median over layers, and a band that half of them are in."""
    import torch

    widest = max(layer.dim for layer in view.layers)
    series = []
    for i, name in enumerate(view.tasks):
        # A layer has nothing in directions beyond its own, so the median has no jumps there.
        shares = torch.zeros(len(view.layers), widest, dtype=torch.float64)
        for row, layer in zip(shares, view.layers, strict=True):
            values = layer.spectra[i].eigenvalues
            row[: layer.dim] = values / values.sum()
        low, median, high = (shares.quantile(q, 0).tolist() for q in (0.25, 0.5, 0.75))
        # 0 has no place on a logarithmic scale.
        there = [d for d in _directions(widest) if low[d] > 0]
        both = [*there, *reversed(there)]
        edge = [*(high[d] for d in there), *(low[d] for d in reversed(there))]
        places = [float(d + 1) for d in both]
        series.append(Series("", places, edge, colour_of(i), "", opacity=0.15, filled=True))
        drawn = [d for d in _directions(widest) if median[d] > 0]
        xs, ys = [float(d + 1) for d in drawn], [median[d] for d in drawn]
        series.append(Series(name, xs, ys, colour_of(i), "", line=2, dash=DASHES[i // 8 % 4]))
    caption = (
        "Eigenvalues of each task's second moments of inputs, as shares of their trace: the median "
        f"of {len(view.layers)} layers, and a band that half of the layers are in."
    )
    rows = [
        [layer.name, *(fixed(spectrum.effective_rank) for spectrum in layer.spectra)]
        for layer in view.layers
    ]
    table = Table(["layer", *view.tasks], rows, "Effective ranks")
    axes = Axis("direction", log=True), Axis("share of the trace", log=True)
    return Figure("Spectra", caption, Chart(340, *axes, series), table)


def _directions(num: int) -> list[int]:
    """All of them, or enough for a curve on a logarithmic axis."""
    steps = (num ** (i / (_NUM_POINTS - 1)) - 1 for i in range(_NUM_POINTS))
    return sorted({min(round(step), num - 1) for step in steps})


def _distance_figure(view: SubspaceView) -> Figure:
    """Dots: how far the merged weights are from each model's, inside and outside."""
    found = view.summary()
    means = list(found["distances"].values())
    size = "|W − W_base|" if view.relative_to == "base" else "|W|"
    looks = {"inside": "circle", "outside": "square", "inside_at_random": "ring"}
    series = []
    for i, (key, symbol) in enumerate(looks.items()):
        name = key.replace("_at", ", at").replace("_", " ")
        there = [j for j, mean in enumerate(means) if mean[key] is not None]
        values = [means[j][key] for j in there]
        titles = [f"{view.tasks[j]}, {name}: {fixed(means[j][key], 3)}" for j in there]
        series.append(Series(name, values, there, colour_of(i), symbol, titles=titles))
    caption = "Distances of the merged weights from each model's, in and out of its subspace."
    x = Axis(f"distance of the merged weights, in {size}", low=0.0)
    chart = Chart(0, x, Axis(names=view.tasks), series)
    return Figure("Inside and outside of the subspace", caption, chart, _distance_table(found))
