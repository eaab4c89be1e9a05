"""Where a merge lies in its tasks' subspaces, if models and statistics are still there."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.opening import local_path, open_checkpoint
from matsmerge.engine.private_paths import read_paths
from matsmerge.errors import MatsError
from matsmerge.reports.merge_report import MODEL, read_merge
from matsmerge.statistics.statistics_file import open_statistics
from matsmerge.statistics.subspace_view import Task, prepare_view

_MAX_BYTES = 32 * 2**20  # of second moments; decomposing more takes minutes


def find_subspaces(
    folder: Path,
    *,
    whatever_it_takes: bool = False,
    begin: Callable[[int], None] = lambda _: None,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Any] | str | None:
    """In the form of `mats inspect --subspace --json`; None where something is missing.

    A sentence where it would take long and `whatever_it_takes` is not given.

    `begin` is told of the bytes to decompose, `advance` of those that are done.
    """
    has_base = bool(read_merge(folder)["recipe"].get("base"))
    paths = read_paths(folder / MODEL if (folder / MODEL).is_dir() else folder)
    files, sources = paths.statistics, paths.models
    names = [name for name in sources if name in files]
    bases = [paths.base] if has_base and paths.base else []
    needed = [*bases, *files.values(), *(sources[name] for name in names)]
    # What would have to be fetched from the hub is not "still there".
    if not names or not all(local_path(place).exists() for place in needed):
        return None
    try:
        tasks = [
            Task(name, open_statistics(files[name]), open_checkpoint(sources[name]))
            for name in names
        ]
        place = folder / MODEL if (folder / MODEL).is_dir() else folder
        base = open_checkpoint(bases[0]) if bases else None
        prepared = prepare_view(tasks, open_checkpoint(place), base)
        if prepared.num_bytes > _MAX_BYTES and not whatever_it_takes:
            size = f"{prepared.num_bytes / 2**20:,.0f} MiB"
            return (
                f"The tasks' subspaces were not looked at, for decomposing {size} of statistics "
                "takes minutes; `mats report --subspaces` does it."
            )
        begin(prepared.num_bytes)
        view = prepared.run(advance)
    except MatsError:
        return None
    num = range(len(view.tasks))
    return {
        "tasks": [{"name": name} for name in view.tasks],
        "rank": view.size.rank,
        "energy": view.size.energy,
        "overlap": [[_known(view.overlap(a, b)) for b in num] for a in num],
        "overlap_at_random": [[_known(view.overlap_at_random(a, b)) for b in num] for a in num],
        "relative_to": view.relative_to,
        "distances": {
            name: {key: _known(value) for key, value in view.mean_distance(i).items()}
            for i, name in enumerate(view.tasks)
        },
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
