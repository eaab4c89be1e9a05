"""`mats inspect`."""

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from matsmerge.byte_sizes import format_bytes
from matsmerge.cli import stats_command
from matsmerge.cli.display import JsonScreen
from matsmerge.cli.field_options import CommandOptions, argument, option, takes_options
from matsmerge.errors import RecipeError
from matsmerge.lab.commands import subspace_command

if TYPE_CHECKING:
    from matsmerge.checkpoints.checkpoint import Checkpoint
    from matsmerge.checkpoints.summary import Difference

_MAX_LISTED = 12


class InspectScreen(JsonScreen):
    """A screen that shows the result in any case, as nothing else comes of the command."""

    quiet: bool = option(False, short="-q")
    """No progress."""

    @property
    def shows_result(self) -> bool:
        return not self.as_json


class Inspected(CommandOptions):
    """What to look at."""

    path: str = argument()
    """A checkpoint (file, folder or hub id) or statistics."""

    other: str | None = argument(None)
    """A second one: show the differences."""


@takes_options
def inspect(
    asked: Inspected, screen: InspectScreen, subspaces: subspace_command.SubspaceOptions
) -> None:
    """Show what is in a checkpoint or a file of statistics, or how two checkpoints differ.

    For statistics and a model: whether they belong together.

        mats inspect merged --subspace --figure subspaces.png
    """
    from matsmerge.checkpoints.source import open_checkpoint
    from matsmerge.statistics.statistics_file import is_statistics_file

    path, other = asked.path, asked.other
    if subspaces.subspace:
        subspace_command.inspect(path, other, subspaces, screen)
        return
    if subspaces.given:
        raise RecipeError(f"{', '.join(subspaces.given)}: only with --subspace")
    if is_statistics_file(path):
        stats_command.inspect(path, other, screen)
        return
    checkpoint = open_checkpoint(path)
    if other is None:
        _show_one(checkpoint, screen)
    else:
        _show_difference(checkpoint, open_checkpoint(other), screen)


def _show_one(checkpoint: "Checkpoint", screen: JsonScreen) -> None:
    from matsmerge.checkpoints.fingerprint import fingerprint
    from matsmerge.checkpoints.summary import summarize

    summary, identity = summarize(checkpoint), fingerprint(checkpoint)
    content = {
        "path": checkpoint.label,
        "fingerprint": identity,
        "kinds": {kind: asdict(found) for kind, found in summary.items()},
        "tied": dict(checkpoint.aliases),
    }
    screen.result(content)
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
    screen.table(columns, rows, title=checkpoint.label)
    tied = [f"tied: {name} is {kept}" for name, kept in checkpoint.aliases.items()]
    screen.say(*_shortened(tied, " that are tied"), f"fingerprint: {identity[:16]}")
    screen.next(f"mats inspect {shlex.quote(checkpoint.label)} OTHER", "how two models differ")


def _show_difference(first: "Checkpoint", second: "Checkpoint", screen: JsonScreen) -> None:
    from matsmerge.checkpoints.summary import compare_checkpoints

    with screen.bars() as bars:
        found = compare_checkpoints(first, second, bars)
    changed = {n: d if math.isfinite(d) else None for n, d in found.changed.items()}
    screen.result(asdict(found) | {"changed": changed})
    for names, title in (
        (found.only_first, f"only in {first.label}"),
        (found.only_second, f"only in {second.label}"),
        ([f"{n}: {first.specs[n]} / {second.specs[n]}" for n in found.other_shape], "other shape"),
        ([f"{n}: {first.specs[n]} / {second.specs[n]}" for n in found.other_dtype], "other dtype"),
    ):
        if names:
            screen.say(f"{title} ({len(names)})", style="bold")
            screen.say(*(f"  {line}" for line in _shortened(names)))
    rows = [(name, f"{distance:.3%}") for name, distance in found.changed.items()]
    screen.say(f"{found.num_equal} tensors equal, {len(rows)} changed")
    if rows:
        title = "most changed, relative to the first"
        screen.table(("tensor", "distance"), rows[:_MAX_LISTED], title)
    _show_verdict(found, second, screen)


def _show_verdict(found: "Difference", second: "Checkpoint", screen: JsonScreen) -> None:
    """In a sentence, whether two models are the same, relatives or strangers."""
    place = shlex.quote(second.label)
    if not found.changed and not (found.other_shape or found.other_dtype):
        both = "but for what only one has, " if found.only_first or found.only_second else ""
        screen.say(f"{both}they are the same model")
    elif found.changed:
        middle = statistics.median(found.changed.values())
        near = "far apart" if middle > 0.5 else "apart" if middle > 0.05 else "close together"
        screen.say(f"they are {near}: a typical tensor that changed differs by {middle:.1%}")
    screen.next(f"mats evaluate {place} --task TASK.yaml", "how good it is")


def _shortened(lines: Sequence[str], of: str = "") -> list[str]:
    left = len(lines) - _MAX_LISTED
    return [*lines[:_MAX_LISTED], *([f"and {left} more{of}"] if left > 0 else [])]
