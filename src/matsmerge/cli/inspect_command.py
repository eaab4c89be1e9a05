"""`mats inspect`."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from matsmerge.cli import display, stats_command
from matsmerge.cli.shared_options import RUNNING, AsJson, option
from matsmerge.lab.commands import subspace_command
from matsmerge.limits import MOST_RANK

if TYPE_CHECKING:
    from matsmerge.checkpoints.checkpoint import Checkpoint

_MAX_LISTED = 12
_SUBSPACES = "Subspaces"


def inspect(
    path: Annotated[
        str, typer.Argument(help="A checkpoint (file, folder or hub id) or statistics.")
    ],
    other: Annotated[
        str | None,
        typer.Argument(help="A second one: show the differences.", show_default=False),
    ] = None,
    quiet: Annotated[bool, option("No progress.", "--quiet", "-q", panel=RUNNING)] = False,
    as_json: AsJson = False,
    subspace: Annotated[
        bool,
        option(
            "Show which directions of each layer's inputs matter to which task, how much tasks "
            "overlap, and where a merged model is from its models. Statistics alone (one file, or "
            "two) show the first two.",
            "--subspace",
            panel=_SUBSPACES,
        ),
    ] = False,
    statistics: Annotated[
        list[str] | None,
        option(
            "A task's statistics, with Gram matrices. Repeatable. Default: what the merge was made "
            "with, or statistics.safetensors beside each model.",
            metavar="FILE",
            panel=_SUBSPACES,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        option(
            "The model of each file of statistics, in the same order. Repeatable. Default: what "
            "was merged.",
            metavar="MODEL",
            panel=_SUBSPACES,
        ),
    ] = None,
    base: Annotated[
        str | None,
        option(
            "Show distances relative to how far each model is from this one. Default: the merge's "
            "base, where its models are taken too.",
            metavar="MODEL",
            panel=_SUBSPACES,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        option("Directions of each subspace, at most.", min=0, max=MOST_RANK, panel=_SUBSPACES),
    ] = None,
    energy: Annotated[
        float | None,
        option("Or as many as hold this share of the trace. Default: 0.9.", panel=_SUBSPACES),
    ] = None,
    layers: Annotated[
        list[str] | None,
        option(
            "Only modules or weights that match, e.g. 'encoder.*'. Repeatable.",
            metavar="PATTERN",
            panel=_SUBSPACES,
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        option("Draw it into a .png, .svg or .html file.", metavar="FILE", panel=_SUBSPACES),
    ] = None,
    force: Annotated[
        bool,
        option("Also with statistics of other models than these.", "--force", panel=_SUBSPACES),
    ] = False,
) -> None:
    """Show what is in a checkpoint or a file of statistics, or how two checkpoints differ.

    For statistics and a model: whether they belong together.

        mats inspect merged --subspace --figure subspaces.png
    """
    from matsmerge.checkpoints.source import open_checkpoint
    from matsmerge.errors import RecipeError
    from matsmerge.statistics.statistics_file import is_statistics_file

    asked = subspace_command.Asked(
        tuple(statistics or ()),
        tuple(model or ()),
        base,
        rank,
        energy,
        tuple(layers or ()),
        figure,
        force,
    )
    if subspace:
        subspace_command.inspect(path, other, asked, quiet=quiet, as_json=as_json)
        return
    if asked.given():
        raise RecipeError(f"{', '.join(asked.given())}: only with --subspace")
    if is_statistics_file(path):
        stats_command.inspect(path, other, quiet=quiet, as_json=as_json)
        return
    checkpoint = open_checkpoint(path)
    if other is None:
        _show_one(checkpoint, as_json=as_json)
    else:
        _show_difference(checkpoint, open_checkpoint(other), quiet=quiet, as_json=as_json)


def _show_one(checkpoint: "Checkpoint", *, as_json: bool) -> None:
    from matsmerge.byte_sizes import format_bytes
    from matsmerge.checkpoints.fingerprint import fingerprint
    from matsmerge.checkpoints.summary import summarize

    summary = summarize(checkpoint)
    if as_json:
        content = {
            "path": checkpoint.label,
            "fingerprint": fingerprint(checkpoint),
            "kinds": {kind: asdict(found) for kind, found in summary.items()},
            "tied": dict(checkpoint.aliases),
        }
        print(json.dumps(content, indent=2))
        return
    rows = [
        (
            kind,
            f"{found.num_tensors:,}",
            f"{found.num_parameters:,}",
            format_bytes(found.num_bytes),
            ", ".join(found.dtypes),
        )
        for kind, found in summary.items()
    ]
    columns = ("kind", "tensors", "parameters", "size", "dtypes")
    display.show_table(columns, rows, title=checkpoint.label)
    for name, kept in list(checkpoint.aliases.items())[:_MAX_LISTED]:
        display.stdout.print(f"tied: {name} is {kept}")
    if len(checkpoint.aliases) > _MAX_LISTED:
        display.stdout.print(f"and {len(checkpoint.aliases) - _MAX_LISTED} more that are tied")
    display.stdout.print(f"fingerprint: {fingerprint(checkpoint)[:16]}")


def _show_difference(
    first: "Checkpoint", second: "Checkpoint", *, quiet: bool, as_json: bool
) -> None:
    from matsmerge.checkpoints.summary import compare

    with display.progress_bars(quiet=quiet or as_json) as bars:
        found = compare(first, second, bars)
    if as_json:
        changed = {n: d if math.isfinite(d) else None for n, d in found.changed.items()}
        print(json.dumps(asdict(found) | {"changed": changed}, indent=2))
        return
    for names, title in (
        (found.only_first, f"only in {first.label}"),
        (found.only_second, f"only in {second.label}"),
        ([f"{n}: {first.specs[n]} / {second.specs[n]}" for n in found.other_shape], "other shape"),
        ([f"{n}: {first.specs[n]} / {second.specs[n]}" for n in found.other_dtype], "other dtype"),
    ):
        if names:
            display.stdout.print(f"{title} ({len(names)})", style="bold")
            for name in names[:_MAX_LISTED]:
                display.stdout.print(f"  {name}")
            if len(names) > _MAX_LISTED:
                display.stdout.print(f"  and {len(names) - _MAX_LISTED} more")
    rows = [(name, f"{distance:.3%}") for name, distance in found.changed.items()]
    display.stdout.print(f"{found.num_equal} tensors equal, {len(rows)} changed")
    if rows:
        title = "most changed, relative to the first"
        display.show_table(("tensor", "distance"), rows[:_MAX_LISTED], title)
