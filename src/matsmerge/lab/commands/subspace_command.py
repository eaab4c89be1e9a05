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

if TYPE_CHECKING:
    from matsmerge.lab.subspaces.subspace_findings import SubspaceView, TaskSpectrum
    from matsmerge.lab.subspaces.subspace_view import Task

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
    from matsmerge.checkpoints.source import local_path
    from matsmerge.errors import RecipeError
    from matsmerge.lab.subspaces.subspace_findings import DEFAULT_ENERGY, SubspaceSize
    from matsmerge.lab.subspaces.subspace_inputs import open_merge, open_tasks
    from matsmerge.lab.subspaces.subspace_view import prepare_view
    from matsmerge.statistics.statistics_file import is_statistics_file

    if asked.rank is not None and asked.energy is not None:
        raise RecipeError("give either --rank or --energy: both say how large subspaces are")
    size = SubspaceSize(asked.rank, DEFAULT_ENERGY if asked.energy is None else asked.energy)
    target = None if asked.figure is None else local_path(asked.figure)
    if target is not None:
        from matsmerge.lab.reports.subspace_report import check_figure, write_figure

        check_figure(target)
    if is_statistics_file(path):
        if asked.models or asked.base is not None:
            raise RecipeError(
                f"{path}: holds statistics, and models are compared with a merged one; write "
                "mats inspect MERGED --subspace --statistics FILE --model MODEL"
            )
        files = [path, *([] if other is None else [other]), *asked.statistics]
        merged, base, tasks = None, None, open_tasks(files)
    elif other is not None:
        raise RecipeError(
            f"{other}: with --subspace one merged model is looked at; give statistics with "
            "--statistics and the models it was made of with --model"
        )
    else:
        merged, base, tasks = open_merge(path, asked.models, asked.statistics, asked.base)
    prepared = prepare_view(tasks, merged, base, size=size, layers=asked.layers, force=asked.force)
    with display.progress_bars(quiet=quiet or as_json) as bars:
        view = prepared.run(bars)
    if target is not None:
        write_figure(view, target)
    if as_json:
        print(json.dumps(_content(view, path, tasks), indent=2))
        return
    _show(view)
    if target is not None and not quiet:
        display.stdout.print(f"figure in {target}", soft_wrap=True)


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
    from matsmerge.lab.subspaces.subspace_findings import mean

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
    from matsmerge.lab.subspaces.subspace_findings import without_nan

    content = {
        "path": path,
        **view.summary(),
        "tasks": [
            {
                "name": task.name,
                "statistics": task.statistics.arrays.label,
                "model": None if task.model is None else task.model.label,
            }
            for task in tasks
        ],
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
    return dict(without_nan(content))


def _spectrum_content(found: "TaskSpectrum") -> dict[str, Any]:
    largest = found.eigenvalues[:_NUM_EIGENVALUES].tolist()
    return asdict(found) | {"eigenvalues": largest, "trace": float(found.eigenvalues.sum())}
