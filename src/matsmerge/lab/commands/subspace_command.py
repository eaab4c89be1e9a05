"""`mats inspect --subspace`: the directions that matter to tasks, and what a merge did to them."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from matsmerge.cli.display import JsonScreen, Screen, number
from matsmerge.cli.field_options import CommandOptions, option
from matsmerge.errors import RecipeError
from matsmerge.limits import MOST_RANK

if TYPE_CHECKING:
    from matsmerge.lab.subspaces.subspace_findings import SubspaceView, TaskSpectrum
    from matsmerge.lab.subspaces.subspace_view import SubspaceTask

_NUM_EIGENVALUES = 32  # of each layer, in JSON
_NUM_WORST = 8
_MAX_COLUMNS = 4  # tasks side by side, beyond which only the lowest and the highest are shown
# Viridis, which is told apart with any kind of colour vision, from 0 to 1.
_HEAT = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")


class SubspaceOptions(CommandOptions):
    """The options of `mats inspect` that are about subspaces."""

    panel = "Subspaces"

    subspace: bool = False
    """Show which directions of each layer's inputs matter to which task, how much tasks overlap,
    and where a merged model is from its models. Statistics alone (one file, or two) show the first
    two."""

    statistics: list[str] = option([], metavar="FILE")
    """A task's statistics, with Gram matrices. Repeatable. Default: what the merge was made with,
    or statistics.safetensors beside each model."""

    model: list[str] = option([], metavar="MODEL")
    """The model of each file of statistics, in the same order. Repeatable. Default: what was
    merged."""

    base: str | None = option(metavar="MODEL")
    """Show distances relative to how far each model is from this one. Default: the merge's base,
    where its models are taken too."""

    rank: int | None = option(ge=0, le=MOST_RANK)
    """Directions of each subspace, at most."""

    energy: float | None = None
    """Or as many as hold this share of the trace. Default: 0.9."""

    layers: list[str] = option([], metavar="PATTERN")
    """Only modules or weights that match, e.g. 'encoder.*'. Repeatable."""

    figure: Path | None = option(metavar="FILE")
    """Draw it into a .png, .svg or .html file."""

    force: bool = False
    """Also with statistics of other models than these."""

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        fields = type(self).model_fields
        return [f"--{name}" for name, value in self if value != fields[name].default]


def inspect(path: str, other: str | None, asked: SubspaceOptions, screen: JsonScreen) -> None:
    """Show the subspaces of statistics, or of a merged model's tasks and where it is in them."""
    from matsmerge.lab.subspaces.subspace_findings import DEFAULT_ENERGY, SubspaceSize
    from matsmerge.lab.subspaces.subspace_inputs import open_merge, open_tasks
    from matsmerge.lab.subspaces.subspace_view import prepare_view
    from matsmerge.statistics.statistics_file import is_statistics_file

    if asked.rank is not None and asked.energy is not None:
        raise RecipeError("give either --rank or --energy: both say how large subspaces are")
    size = SubspaceSize(asked.rank, DEFAULT_ENERGY if asked.energy is None else asked.energy)
    target = asked.figure
    if target is not None:
        from matsmerge.lab.reports.report_files import check_figure, write_figure

        check_figure(target)
    if is_statistics_file(path):
        if asked.model or asked.base is not None:
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
        merged, base, tasks = open_merge(path, asked.model, asked.statistics, asked.base)
    prepared = prepare_view(tasks, merged, base, size=size, layers=asked.layers, force=asked.force)
    with screen.bars() as bars:
        view = prepared.run(bars)
    if target is not None:
        write_figure(view, target)
    if screen.as_json:
        screen.result(_content(view, path, tasks))
    _show_layers(view, screen)
    if len(view.tasks) > 1:
        _show_overlaps(view, screen)
    if view.relative_to is not None:
        _show_distances(view, screen)
    if view.skipped:
        screen.say("", *(f"left out: {len(found)} {why}" for why, found in view.skipped.items()))
    if target is not None and not screen.quiet:
        screen.say(f"figure in {target}")
    if merged is None:
        screen.next("mats inspect MERGED --subspace", "where a model merged with these is")
    else:
        screen.next(f"mats report {shlex.quote(path)}", "the same as a page, with the recipe")


def _show_layers(view: "SubspaceView", screen: Screen) -> None:
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
    screen.table(("", "shared by", "dim", *names, "overlap", "at random"), rows, title)


def _show_overlaps(view: "SubspaceView", screen: Screen) -> None:
    from matsmerge.lab.subspaces.subspace_findings import defined_mean

    rows: list[tuple[str | Text, ...]] = []
    for a, name in enumerate(view.tasks):
        expected = [view.overlap_at_random(a, b) for b in range(len(view.tasks)) if b != a]
        cells = [_heat_cell(view.overlap(a, b)) for b in range(len(view.tasks))]
        rows.append((f"{a + 1} {name}", *cells, number(defined_mean(expected))))
    screen.say("")
    numbers = [Text(str(b + 1), justify="center") for b in range(len(view.tasks))]
    screen.table(
        ("", *numbers, "at random"),
        rows,
        "overlap of subspaces, mean over layers",
        fold=False,
    )


def _heat_cell(value: float) -> Text:
    if math.isnan(value):
        return Text("-", justify="center")
    step = min(int(value * len(_HEAT)), len(_HEAT) - 1)
    ink = "#ffffff" if step < len(_HEAT) // 2 else "#000000"
    return Text(f" {value:.2f} ", style=f"{ink} on {_HEAT[max(step, 0)]}", justify="center")


def _show_distances(view: "SubspaceView", screen: Screen) -> None:
    size = "|W - W_base|" if view.relative_to == "base" else "|W|"
    forms = {
        "inside": "{:.3f}",
        "outside": "{:.3f}",
        "inside_share": "{:.1%}",
        "inside_share_at_random": "{:.1%}",
        "at_outputs": "{:.1%}",
    }
    means = [(name, view.mean_distance(i)) for i, name in enumerate(view.tasks)]
    screen.say("")
    screen.table(
        ("", "inside", "outside", "share inside", "at random", "change of outputs"),
        [(name, *(number(m[key], form) for key, form in forms.items())) for name, m in means],
        f"merged weights from each model's, in {size}, mean",
    )
    found = [(d, name) for i, name in enumerate(view.tasks) for d in view.distances(i)]
    changed = [(d, name) for d, name in found if d.at_outputs > 0]
    worst = sorted(changed, key=lambda pair: -pair[0].at_outputs)[:_NUM_WORST]
    if worst:
        keys = ("inside", "outside", "at_outputs")
        screen.say("")
        screen.table(
            ("", "task", "inside", "outside", "change of outputs"),
            [(d.weight, n, *(number(getattr(d, k), forms[k]) for k in keys)) for d, n in worst],
            "weights whose outputs change most",
        )


def _content(view: "SubspaceView", path: str, tasks: "Sequence[SubspaceTask]") -> dict[str, Any]:
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
