"""`mats inspect --subspace`: the directions that matter to tasks, and what a merge did to them."""

import importlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from matsmerge.cli import display

if TYPE_CHECKING:
    from matsmerge.checkpoints.checkpoint import Checkpoint
    from matsmerge.statistics.subspace_view import Distance, SubspaceView, Task, TaskSpectrum

_NUM_EIGENVALUES = 32  # of each layer, in JSON
_NUM_WORST = 8
# Viridis, which is told apart with any kind of colour vision, from 0 to 1.
_HEAT = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")
# Okabe and Ito's palette, made for all kinds of colour vision.
_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#000000", "#b8a900",
)  # fmt: skip
_LINES = ("-", "--", ":", "-.")
_LABEL_LENGTH = 22
_TITLE_PAD = 22  # room for a legend below it
_FIGURE_SUFFIXES = (".png", ".svg", ".html")


@dataclass(frozen=True)
class Asked:
    """The options of `mats inspect` that are about subspaces."""

    statistics: Sequence[str] = ()
    models: Sequence[str] = ()
    base: str | None = None
    rank: int | None = None
    energy: float | None = None
    layers: Sequence[str] = ()
    figure: Path | None = None
    force: bool = False

    def given(self) -> list[str]:
        """The options that were given, as they are written."""
        values = {
            "--statistics": self.statistics,
            "--model": self.models,
            "--base": self.base,
            "--rank": self.rank,
            "--energy": self.energy,
            "--layers": self.layers,
            "--figure": self.figure,
            "--force": self.force,
        }
        return [option for option, value in values.items() if value not in ((), [], None, False)]


def inspect(path: str, other: str | None, asked: Asked, *, quiet: bool, as_json: bool) -> None:
    """Show the subspaces of statistics, or of a merged model's tasks and where it is in them."""
    from matsmerge.checkpoints.opening import local_path
    from matsmerge.errors import RecipeError
    from matsmerge.statistics.statistics_file import is_statistics_file
    from matsmerge.statistics.subspace_view import DEFAULT_ENERGY, SubspaceSize, prepare_view

    if asked.rank is not None and asked.energy is not None:
        raise RecipeError("give either --rank or --energy: both say how large subspaces are")
    size = SubspaceSize(asked.rank, DEFAULT_ENERGY if asked.energy is None else asked.energy)
    target = None if asked.figure is None else local_path(asked.figure)
    if target is not None:
        _check_figure(target)
    if is_statistics_file(path):
        merged, base, tasks = None, None, _open_statistics_alone(path, other, asked)
    else:
        merged, base, tasks = _open_merge(path, other, asked)
    prepared = prepare_view(tasks, merged, base, size=size, layers=asked.layers, force=asked.force)
    with display.progress_bars(quiet=quiet or as_json) as bars:
        bars.stage("decomposing", prepared.num_bytes)
        view = prepared.run(bars.advance)
    if target is not None:
        _write_figure(view, target)
    if as_json:
        print(json.dumps(_content(view, path, tasks), indent=2))
        return
    _show(view)
    if target is not None and not quiet:
        display.stdout.print(f"figure in {target}", markup=False, soft_wrap=True)


def _open_statistics_alone(path: str, other: str | None, asked: Asked) -> "list[Task]":
    from matsmerge.errors import RecipeError
    from matsmerge.recipes.recipe import short_names
    from matsmerge.statistics.statistics_file import open_statistics
    from matsmerge.statistics.subspace_view import Task

    if asked.models or asked.base is not None:
        raise RecipeError(
            f"{path}: holds statistics, and models are compared with a merged one; write "
            "mats inspect MERGED --subspace --statistics FILE --model MODEL"
        )
    files = [path, *([] if other is None else [other]), *asked.statistics]
    opened = _open_all(files, open_statistics)
    names = short_names([file.removesuffix(".safetensors") for file in files])
    return [Task(name, found) for name, found in zip(names, opened, strict=True)]


def _open_merge(
    path: str, other: str | None, asked: Asked
) -> "tuple[Checkpoint, Checkpoint | None, list[Task]]":
    from matsmerge.checkpoints.opening import open_checkpoint
    from matsmerge.errors import RecipeError
    from matsmerge.recipes.recipe import short_names
    from matsmerge.statistics.statistics_file import open_statistics
    from matsmerge.statistics.subspace_view import Task

    if other is not None:
        raise RecipeError(
            f"{other}: with --subspace one merged model is looked at; give statistics with "
            "--statistics and the models it was made of with --model"
        )
    merged = open_checkpoint(path)
    recipe = _merge_recipe(merged)
    entries = recipe.get("models", [])
    models = list(asked.models) or [str(entry["model"]) for entry in entries]
    statistics = list(asked.statistics)
    statistics = statistics or [str(e["statistics"]) for e in entries if e.get("statistics")]
    if not models and not statistics:
        raise RecipeError(
            f"{path}: was not merged by a recipe with statistics (no merge.json names them); say "
            "what it was made of: --model MODEL --statistics FILE for each task"
        )
    if len(models) != len(statistics):
        raise RecipeError(
            f"there are {len(models)} models and {len(statistics)} files of statistics; give "
            "--model and --statistics for each task, in the same order"
        )
    base = asked.base
    if base is None and not asked.models:
        base = recipe.get("base")
    opened = _open_all(models, open_checkpoint, None if asked.models else "--model")
    found = _open_all(statistics, open_statistics, None if asked.statistics else "--statistics")
    bases = _open_all([base] if base else [], open_checkpoint, None if asked.base else "--base")
    names = [str(entry.get("name") or "") for entry in entries]
    if asked.models or not all(names):
        names = short_names(models)
    tasks = [Task(n, s, m) for n, s, m in zip(names, found, opened, strict=True)]
    return merged, bases[0] if bases else None, tasks


def _merge_recipe(merged: "Checkpoint") -> dict[str, Any]:
    """The recipe in the `merge.json` beside merged weights; empty where there is none."""
    from matsmerge.checkpoints.companions import read_json
    from matsmerge.errors import CheckpointError

    path = None if merged.folder is None else merged.folder / "merge.json"
    if path is None or not path.exists():
        return {}
    recipe = read_json(path).get("recipe")
    models = recipe.get("models") if isinstance(recipe, dict) else None
    if not isinstance(models, list) or not all(
        isinstance(e, dict) and "model" in e for e in models
    ):
        raise CheckpointError(f"{path}: names no models; it was damaged or edited")
    assert isinstance(recipe, dict)
    return recipe


def _open_all(names: Sequence[str], opener: Any, option: str | None = None) -> list[Any]:
    """Open everything, or say of all that cannot be; with an option, `merge.json` named them."""
    from matsmerge.errors import MatsError

    opened, problems = [], []
    kind = MatsError
    hint = f"; merge.json names it, say with {option} where it is now" if option else ""
    for name in names:
        try:
            opened.append(opener(name))
        except MatsError as error:
            kind = type(error)
            problems += [f"{problem}{hint}" for problem in error.problems]
    if problems:
        raise kind(problems)
    return opened


def _show(view: "SubspaceView") -> None:
    _show_layers(view)
    if len(view.tasks) > 1:
        display.stdout.print()
        _show_overlaps(view)
    if view.relative_to is not None:
        display.stdout.print()
        _show_distances(view)
    if view.skipped:
        display.stdout.print()
    for why, weights in view.skipped.items():
        display.stdout.print(f"left out: {len(weights)} {why}", markup=False, soft_wrap=True)


def _show_layers(view: "SubspaceView") -> None:
    size = view.size
    held = f"{size.energy:.0%} of the trace" if size.rank is None else f"at most {size.rank}"
    title = f"inputs: effective rank (directions of the subspace: {held})"
    rows = [
        (
            layer.name,
            str(len(layer.weights)),
            str(layer.dim),
            *(f"{found.effective_rank:.1f} ({found.rank})" for found in layer.spectra),
            *(
                (_number(layer.mean_overlap), _number(layer.mean_at_random))
                if len(view.tasks) > 1
                else ()
            ),
        )
        for layer in view.layers
    ]
    pairs = ("overlap", "at random") if len(view.tasks) > 1 else ()
    display.show_table(("", "shared by", "dim", *view.tasks, *pairs), rows, title)


def _show_overlaps(view: "SubspaceView") -> None:
    from matsmerge.statistics.subspace_view import mean

    table = Table(
        title="overlap of subspaces, mean over layers",
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    table.add_column("", overflow="fold")
    for b in range(len(view.tasks)):
        table.add_column(str(b + 1), justify="center", no_wrap=True)
    table.add_column("at random", justify="right", no_wrap=True)
    for a, name in enumerate(view.tasks):
        others = [b for b in range(len(view.tasks)) if b != a]
        expected = [view.overlap_at_random(a, b) for b in others]
        cells = [_heat_cell(view.overlap(a, b)) for b in range(len(view.tasks))]
        table.add_row(Text(f"{a + 1} {name}"), *cells, _number(mean(expected)))
    console = display.stdout
    if not console.is_terminal:
        console = Console(highlight=False, width=10_000)
    console.print(table)


def _heat_cell(value: float) -> Text:
    if math.isnan(value):
        return Text("-")
    step = min(int(value * len(_HEAT)), len(_HEAT) - 1)
    ink = "#ffffff" if step < len(_HEAT) // 2 else "#000000"
    return Text(f" {value:.2f} ", style=f"{ink} on {_HEAT[max(step, 0)]}")


def _show_distances(view: "SubspaceView") -> None:
    size = "|W - W_base|" if view.relative_to == "base" else "|W|"
    forms = {
        "inside": "{:.3f}",
        "outside": "{:.3f}",
        "inside_share": "{:.1%}",
        "inside_share_at_random": "{:.1%}",
        "at_outputs": "{:.1%}",
    }
    rows = []
    for i, name in enumerate(view.tasks):
        found = view.mean_distance(i)
        rows.append((name, *(_number(found[key], form) for key, form in forms.items())))
    display.show_table(
        ("", "inside", "outside", "share inside", "at random", "change of outputs"),
        rows,
        f"merged weights from each model's, in {size}, mean",
    )
    worst = _worst(view)
    if not worst:
        return
    display.stdout.print()
    display.show_table(
        ("", "task", "inside", "outside", "change of outputs"),
        [
            (
                found.weight,
                name,
                _number(found.inside, "{:.3f}"),
                _number(found.outside, "{:.3f}"),
                _number(found.at_outputs, "{:.1%}"),
            )
            for name, found in worst
        ],
        "weights whose outputs change most",
    )


def _worst(view: "SubspaceView") -> "list[tuple[str, Distance]]":
    """The weights whose outputs change most, of any task."""
    found = [
        (name, distance)
        for i, name in enumerate(view.tasks)
        for distance in view.distances(i)
        if distance.at_outputs > 0
    ]
    return sorted(found, key=lambda pair: -pair[1].at_outputs)[:_NUM_WORST]


def _number(value: float, form: str = "{:.2f}") -> str:
    return "-" if math.isnan(value) else form.format(value)


def _content(view: "SubspaceView", path: str, tasks: "Sequence[Task]") -> dict[str, Any]:
    """Everything, as JSON has it."""
    num = range(len(view.tasks))
    content = {
        "path": path,
        "tasks": [
            {
                "name": task.name,
                "statistics": task.statistics.arrays.label,
                "model": None if task.model is None else task.model.label,
            }
            for task in tasks
        ],
        "rank": view.size.rank,
        "energy": view.size.energy,
        "overlap": [[view.overlap(a, b) for b in num] for a in num],
        "overlap_at_random": [[view.overlap_at_random(a, b) for b in num] for a in num],
        "relative_to": view.relative_to,
        "distances": {
            name: view.mean_distance(i)
            for i, name in enumerate(view.tasks)
            if view.relative_to is not None
        },
        "skipped": {why: list(weights) for why, weights in view.skipped.items()},
        "layers": [
            {
                "name": layer.name,
                "weights": layer.weights,
                "dim": layer.dim,
                "spectra": {
                    name: _spectrum_content(found)
                    for name, found in zip(view.tasks, layer.spectra, strict=True)
                },
                "overlap": layer.overlaps,
                "overlap_at_random": layer.at_random,
                "distances": {
                    name: {d.weight: asdict(d) | {"inside_share": d.inside_share} for d in found}
                    for name, found in zip(view.tasks, layer.distances, strict=True)
                    if found
                },
            }
            for layer in view.layers
        ],
    }
    plain = _without_nan(content)
    assert isinstance(plain, dict)
    return plain


def _spectrum_content(found: "TaskSpectrum") -> dict[str, Any]:
    largest = found.eigenvalues[:_NUM_EIGENVALUES].tolist()
    return asdict(found) | {"eigenvalues": largest, "trace": float(found.eigenvalues.sum())}


def _without_nan(content: Any) -> Any:
    """JSON has no NaN; null says the same."""
    if isinstance(content, dict):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_without_nan(value) for value in content]
    return None if isinstance(content, float) and math.isnan(content) else content


def _check_figure(target: Path) -> None:
    """Refuse a figure that cannot be drawn or written, before any work."""
    from matsmerge.errors import OutputError

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
    _matplotlib()


def _matplotlib() -> Any:
    from matsmerge.errors import OutputError

    try:
        importlib.import_module("matplotlib.figure")
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise OutputError(
            f"--figure needs matplotlib, which cannot be imported ({error}); install it with "
            "`pip install 'matsmerge[figures]'`"
        ) from error


def _write_figure(view: "SubspaceView", target: Path) -> None:
    from matsmerge.errors import OutputError

    matplotlib = _matplotlib()
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
        axes.plot(index, shares.mT.numpy(), style, color=colour, alpha=0.2, linewidth=0.5)
        axes.plot(index, middle.numpy(), style, color=colour, linewidth=1.8, label=_short(name))
    axes.set(xscale="log", yscale="log", xlabel="direction", ylabel="share of the trace")
    axes.set_title(f"Spectra of {len(view.layers)} layers, and their median", pad=_TITLE_PAD)
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def _draw_overlaps(axes: Any, view: "SubspaceView") -> None:
    from matsmerge.statistics.subspace_view import mean

    num = range(len(view.tasks))
    values = [[view.overlap(a, b) for b in num] for a in num]
    axes.imshow(values, vmin=0, vmax=1, cmap="viridis")
    for a in num:
        for b in num:
            ink = "white" if values[a][b] < 0.5 else "black"
            text = _number(values[a][b])
            axes.text(b, a, text, ha="center", va="center", color=ink, fontsize=8)
    names = [_short(name) for name in view.tasks]
    axes.set_xticks(num, names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(num, names)
    expected = mean(view.overlap_at_random(a, b) for a in num for b in num if a != b)
    axes.set_title(f"Overlap of subspaces (at random {_number(expected)})", pad=_TITLE_PAD)


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
    axes.legend(frameon=False, fontsize=8, reverse=True, **above)


def _short(name: str) -> str:
    return name if len(name) <= _LABEL_LENGTH else f"{name[: _LABEL_LENGTH - 1]}…"
