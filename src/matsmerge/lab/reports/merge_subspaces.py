"""Where a merge lies in its tasks' subspaces, if models and statistics are still there."""

from pathlib import Path
from typing import Any

from matsmerge.checkpoints.source import local_path, open_checkpoint
from matsmerge.engine.merge_file import read_merge_file
from matsmerge.engine.output_folder import MANIFEST
from matsmerge.engine.private_paths import read_paths
from matsmerge.errors import MatsError
from matsmerge.lab.subspaces.subspace_view import SubspaceTask, prepare_view
from matsmerge.lab.tuning.trials import MODEL
from matsmerge.progress import AnyProgress
from matsmerge.statistics.statistics_file import open_statistics

_MAX_BYTES = 32 * 2**20  # of second moments; decomposing more takes minutes


def find_subspaces(
    folder: Path, wanted: bool | None = None, progress: AnyProgress | None = None
) -> dict[str, Any] | str | None:
    """The subspaces of a merge's tasks, in the form of `mats inspect --subspace --json`.

    None if models or statistics are missing, or the subspaces are not `wanted` (False). If nobody
    said whether they are (None) and it would take minutes, a sentence that says so.
    """
    if wanted is False:
        return None
    has_base = bool(read_merge_file(folder / MANIFEST)["recipe"].get("base"))
    place = folder / MODEL if (folder / MODEL).is_dir() else folder
    paths = read_paths(place)
    files, sources = paths.statistics, paths.models
    names = [name for name in sources if name in files]
    bases = [paths.base] if has_base and paths.base else []
    needed = [*bases, *files.values(), *(sources[name] for name in names)]
    # What would have to be fetched from the hub is not "still there".
    if not names or not all(local_path(path).exists() for path in needed):
        return None
    try:
        tasks = [
            SubspaceTask(name, open_statistics(files[name]), open_checkpoint(sources[name]))
            for name in names
        ]
        base = open_checkpoint(bases[0]) if bases else None
        prepared = prepare_view(tasks, open_checkpoint(place), base)
        if prepared.num_bytes > _MAX_BYTES and not wanted:
            size = f"{prepared.num_bytes / 2**20:,.0f} MiB"
            return (
                f"The tasks' subspaces were not looked at, for decomposing {size} of statistics "
                "takes minutes; `mats report --subspaces` does it."
            )
        return prepared.run(progress).summary()
    except MatsError:
        return None
