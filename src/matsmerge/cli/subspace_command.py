"""`mats inspect --subspace`: the directions that matter to tasks, and what a merge did to them."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from matsmerge.cli import display
from matsmerge.cli.display import number
from matsmerge.cli.subspace_figure import check_figure, write_figure

if TYPE_CHECKING:
    from matsmerge.checkpoints.checkpoint import Checkpoint
    from matsmerge.statistics.subspace_view import SubspaceView, Task, TaskSpectrum

_NUM_EIGENVALUES = 32  # of each layer, in JSON
_NUM_WORST = 8
_MAX_COLUMNS = 4  # tasks side by side, beyond which only the lowest and the highest are shown
# Viridis, which is told apart with any kind of colour vision, from 0 to 1.
_HEAT = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")


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
        check_figure(target)
    if is_statistics_file(path):
        merged, base, tasks = None, None, _open_statistics_alone(path, other, asked)
    else:
        merged, base, tasks = _open_merge(path, other, asked)
    prepared = prepare_view(tasks, merged, base, size=size, layers=asked.layers, force=asked.force)
    with display.progress_bars(quiet=quiet or as_json) as bars:
        bars.stage("decomposing", prepared.num_bytes)
        view = prepared.run(bars.advance)
    if target is not None:
        write_figure(view, target)
    if as_json:
        print(json.dumps(_content(view, path, tasks), indent=2))
        return
    _show(view)
    if target is not None and not quiet:
        display.stdout.print(f"figure in {target}", soft_wrap=True)


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
    from matsmerge.engine.private_paths import read_paths
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
    recipe, paths = _merge_recipe(merged), read_paths(merged.folder)
    entries = recipe.get("models", [])
    names = [str(entry.get("name") or "") for entry in entries]
    models = list(asked.models) or [
        paths.models.get(name) or str(entry["model"])
        for name, entry in zip(names, entries, strict=True)
    ]
    if not models or len(asked.statistics) not in (0, len(models)):
        raise RecipeError(
            f"there are {len(models)} models and {len(asked.statistics)} files of statistics; give "
            "--model MODEL --statistics FILE for each task, in the same order, or a merged model "
            "whose merge.json names them"
        )
    base = asked.base or (None if asked.models else paths.base or recipe.get("base"))
    opened = _open_all(models, open_checkpoint, None if asked.models else "--model")
    noted = [
        paths.statistics.get(name) or entry.get("statistics")
        for name, entry in zip(names, entries, strict=True)
    ]
    noted = noted if len(noted) == len(models) else [None] * len(models)
    files = list(asked.statistics) or _find_statistics(noted, opened)
    found = _open_all(files, open_statistics, None if asked.statistics else "--statistics")
    bases = _open_all([base] if base else [], open_checkpoint, None if asked.base else "--base")
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
    from matsmerge.engine.merge_file import read_merged_recipe

    path = None if merged.folder is None else merged.folder / "merge.json"
    return {} if path is None or not path.exists() else read_merged_recipe(path)


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
        display.stdout.print(f"left out: {len(weights)} {why}", soft_wrap=True)


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
        overlaps = number(layer.mean_overlap), number(layer.mean_at_random)
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
        table.add_row(Text(f"{a + 1} {name}"), *cells, number(mean(expected)))
    display.print_table(table)


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
        [(name, *(number(m[key], form) for key, form in forms.items())) for name, m in means],
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
            [(d.weight, n, *(number(getattr(d, k), forms[k]) for k in keys)) for d, n in worst],
            "weights whose outputs change most",
        )


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
