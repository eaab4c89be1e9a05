"""Subspaces of tasks: their spectra, how far they overlap, and where a merge lies in them."""

from collections.abc import Mapping
from typing import Any

from matsmerge.lab.reports import figure_style as style
from matsmerge.lab.reports.document import Block, Figure, Table
from matsmerge.lab.reports.figure_style import go, plain
from matsmerge.lab.reports.numbers import fixed, percent
from matsmerge.lab.subspaces.subspace_findings import SubspaceView, without_nan


def overlap_blocks(found: Mapping[str, Any] | None) -> list[Block]:
    """Overlaps and distances, from the summary of a view."""
    if not found:
        return []
    overlaps = [_overlap_figure(found)] if len(found["tasks"]) > 1 else []
    distances = [_distance_table(found)] if found.get("distances") else []
    return [*overlaps, *distances]


def view_figures(view: SubspaceView) -> list[Figure]:
    """What there is to see of a view: spectra, overlaps of several tasks, distances of a merge."""
    figures = [_spectrum_figure(view)]
    if len(view.tasks) > 1:
        figures.append(_overlap_figure(view.summary()))
    if view.relative_to is not None:
        figures.append(_distance_figure(view))
    return figures


def _overlap_figure(found: Mapping[str, Any]) -> Figure:
    """A heat map of the overlaps of every two tasks."""
    tasks = [str(task["name"]) for task in found["tasks"]]
    values, expected = without_nan([found["overlap"], found["overlap_at_random"]])
    pairs = [(a, b) for a in range(len(tasks)) for b in range(a) if values[a][b] is not None]
    rank, energy = found.get("rank"), found.get("energy")
    size = f"{rank} directions" if rank else f"{energy:.0%} of the trace"
    caption = f"Overlap of the tasks' subspaces ({size} of each layer's inputs), mean over "
    caption += "layers: 1 is the same subspace."
    if pairs:
        a, b = max(pairs, key=lambda pair: values[pair[0]][pair[1]] or 0.0)
        caption += f" {tasks[b]} and {tasks[a]} share most, {values[a][b]:.2f}"
        caption += f" ({expected[a][b]:.2f} at random)." if expected[a][b] is not None else "."
    rows = [
        [task, *(fixed(value, 2) for value in row)] for task, row in zip(tasks, values, strict=True)
    ]
    names = [plain(task) for task in tasks]
    heat = go.Heatmap(
        name="overlap",
        x=names,
        y=names,
        z=values,
        texttemplate="%{z:.2f}",
        zmin=0,
        zmax=1,
        colorscale=style.SEQUENTIAL,
        hovertemplate="%{y} and %{x}: %{z:.3f}<extra></extra>",
    )
    plot = style.plot(
        150 + 38 * len(tasks),
        [heat],
        x={"side": "top", "showgrid": False},
        y={"autorange": "reversed", "showgrid": False},
        margin={"r": 10, "t": 10, "b": 10},
    )
    return Figure("Overlap of subspaces", caption, plot, Table(["overlap", *tasks], rows))


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
    """Each task's eigenvalues: a thin line for every layer, and their median."""
    import torch

    widest = max(layer.dim for layer in view.layers)
    y = {"title": "share of the trace", **style.LOG}
    plot = style.plot(400, x={"title": "direction", "type": "log"}, y=y, showlegend=True)
    for i, name in enumerate(view.tasks):
        # A layer has nothing in directions beyond its own, so the median has no jumps there.
        shares = torch.zeros(len(view.layers), widest, dtype=torch.float64)
        for row, layer in zip(shares, view.layers, strict=True):
            values = layer.spectra[i].eigenvalues
            row[: layer.dim] = values / values.sum()
        hover = "direction %{x}: %{y:.2e}<extra>" + plain(name) + "</extra>"
        for j, values in enumerate([*shares, shares.quantile(0.5, 0)]):
            is_median = j == len(shares)
            num = int((values > 0).sum())  # 0 has no place on a logarithmic scale
            look: Any = {"opacity": 1 if is_median else 0.3, "showlegend": is_median}
            line: Any = {"color": style.colour(i), "dash": style.dash(i // 8)}
            line["width"] = 2 if is_median else 0.6
            directions, held = range(1, num + 1), values[:num].tolist()
            plot.add_trace(
                style.points(
                    name, directions, held, hover, "lines", line=line, legendgroup=str(i), **look
                )
            )
    caption = (
        "Eigenvalues of each task's second moments of inputs, as shares of their trace; thin "
        f"lines are the {len(view.layers)} layers, thick ones their median."
    )
    rows = [
        [layer.name, *(fixed(spectrum.effective_rank) for spectrum in layer.spectra)]
        for layer in view.layers
    ]
    return Figure("Spectra", caption, plot, Table(["layer", *view.tasks], rows))


def _distance_figure(view: SubspaceView) -> Figure:
    """Bars: how far the merged weights are from each model's, inside and outside."""
    found = view.summary()
    means = list(found["distances"].values())
    places = [len(means) - i for i in range(len(means))]
    size = "|W − W<sub>base</sub>|" if view.relative_to == "base" else "|W|"
    plot = style.plot(
        120 + 60 * len(means),
        x=f"distance of the merged weights, in {size}",
        y=style.names_axis(view.tasks),
        showlegend=True,
    )
    for i, (key, shift) in enumerate([("inside", 0.2), ("outside", -0.2)]):
        plot.add_bar(
            orientation="h",
            name=key,
            x=[mean[key] for mean in means],
            y=[place + shift for place in places],
            width=0.38,
            text=[f"\u2002{fixed(mean[key], 2)}" for mean in means],
            textposition="outside",
            cliponaxis=False,
            marker={"color": style.colour(i)},
            hovertemplate=f"{key}: " + "%{x:.3f}<extra></extra>",
        )
    expected = [mean["inside_at_random"] for mean in means]
    marker = {"symbol": "line-ns", "size": 16, "line": {"width": 2, "color": style.INK}}
    where, hover = [place + 0.2 for place in places], "inside, at random: %{x:.3f}"
    plot.add_trace(style.points("inside, at random", expected, where, hover, marker=marker))
    caption = "Distances of the merged weights from each model's, in and out of its subspace."
    return Figure("Inside and outside of the subspace", caption, plot, _distance_table(found))
