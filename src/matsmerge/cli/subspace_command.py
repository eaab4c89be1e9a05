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
    from matsmerge.statistics.subspace_view import SubspaceView, Task, TaskSpectrum

_NUM_EIGENVALUES = 32  # of each layer, in JSON
_NUM_WORST = 8
_MAX_COLUMNS = 4  # tasks side by side, beyond which only the lowest and the highest are shown
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
        """The options that were given."""
        options = {"models": "--model"}
        return [
            options.get(name, f"--{name}")
            for name, value in vars(self).items()
            if not (value is None or value is False or value == ())
        ]


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
    if not models or len(asked.statistics) not in (0, len(models)):
        raise RecipeError(
            f"there are {len(models)} models and {len(asked.statistics)} files of statistics; give "
            "--model MODEL --statistics FILE for each task, in the same order, or a merged model "
            "whose merge.json names them"
        )
    base = asked.base or (None if asked.models else recipe.get("base"))
    opened = _open_all(models, open_checkpoint, None if asked.models else "--model")
    noted = [entry.get("statistics") for entry in entries]
    noted = noted if len(noted) == len(models) else [None] * len(models)
    files = list(asked.statistics) or _find_statistics(noted, opened)
    found = _open_all(files, open_statistics, None if asked.statistics else "--statistics")
    bases = _open_all([base] if base else [], open_checkpoint, None if asked.base else "--base")
    names = [str(entry.get("name") or "") for entry in entries]
    if asked.models or not all(names):
        names = short_names(models)
    tasks = [Task(n, s, m) for n, s, m in zip(names, found, opened, strict=True)]
    return merged, bases[0] if bases else None, tasks


def _find_statistics(noted: "Sequence[str | None]", models: "Sequence[Checkpoint]") -> list[str]:
    """What a recipe names, or else what lies beside each model."""
    from matsmerge.engine.evidence import BESIDE
    from matsmerge.errors import RecipeError

    found, problems = [], []
    for name, model in zip(noted, models, strict=True):
        place = model.place if model.place is None or model.place.is_dir() else model.place.parent
        if name is not None:
            found.append(name)
        elif place is not None and (place / BESIDE).exists():
            found.append(str(place / BESIDE))
        else:
            problems.append(
                f"{model.label}: no merge.json names its statistics, and there is no {BESIDE} "
                "beside it; give one file for each model with --statistics, in the same order"
            )
    if problems:
        raise RecipeError(problems)
    return found


def _merge_recipe(merged: "Checkpoint") -> dict[str, Any]:
    """The recipe in the `merge.json` beside merged weights; empty where there is none."""
    from matsmerge.checkpoints.companions import read_json
    from matsmerge.errors import CheckpointError

    path = None if merged.folder is None else merged.folder / "merge.json"
    if path is None or not path.exists():
        return {}
    found = read_json(path).get("recipe")
    recipe = found if isinstance(found, dict) else {}
    models = recipe.get("models")
    if not isinstance(models, list) or not all(
        isinstance(m, dict) and "model" in m for m in models
    ):
        raise CheckpointError(f"{path}: names no models; it was damaged or edited")
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
    each = len(view.tasks) <= _MAX_COLUMNS
    rows = []
    for layer in view.layers:
        ranks = [(found.effective_rank, found.rank) for found in layer.spectra]
        ranks = ranks if each else [min(ranks), max(ranks)]
        cells = (f"{effective:.1f} ({k})" for effective, k in ranks)
        overlaps = _number(layer.mean_overlap), _number(layer.mean_at_random)
        rows.append((layer.name, str(len(layer.weights)), str(layer.dim), *cells, *overlaps))
    names = view.tasks if each else ("lowest", "highest")
    display.show_table(("", "shared by", "dim", *names, "overlap", "at random"), rows, title)


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
    means = [(name, view.mean_distance(i)) for i, name in enumerate(view.tasks)]
    display.show_table(
        ("", "inside", "outside", "share inside", "at random", "change of outputs"),
        [(name, *(_number(m[key], form) for key, form in forms.items())) for name, m in means],
        f"merged weights from each model's, in {size}, mean",
    )
    found = [(d, name) for i, name in enumerate(view.tasks) for d in view.distances(i)]
    changed = [(d, name) for d, name in found if d.at_outputs > 0]
    worst = sorted(changed, key=lambda pair: -pair[0].at_outputs)[:_NUM_WORST]
    if worst:
        keys = ("inside", "outside", "at_outputs")
        display.stdout.print()
        display.show_table(
            ("", "task", "inside", "outside", "change of outputs"),
            [(d.weight, n, *(_number(getattr(d, k), forms[k]) for k in keys)) for d, n in worst],
            "weights whose outputs change most",
        )


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
        axes.plot(index, shares.mT.numpy(), style, color=colour, alpha=0.3, linewidth=0.6)
        axes.plot(index, middle.numpy(), style, color=colour, linewidth=1.8, label=_short(name))
    axes.set(xscale="log", yscale="log", xlabel="direction", ylabel="share of the trace")
    axes.set_title(f"Spectra of {len(view.layers)} layers, and their median", pad=_TITLE_PAD)
    axes.legend(edgecolor="none", fontsize=8, loc="lower left")


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
    marks, *bars = zip(*axes.get_legend_handles_labels(), strict=True)
    axes.legend(*zip(*bars, marks, strict=True), frameon=False, fontsize=8, **above)


def _short(name: str) -> str:
    return name if len(name) <= _LABEL_LENGTH else f"{name[: _LABEL_LENGTH - 1]}…"
