"""The local paths of a merge's inputs, in a hidden file that is kept from uploads.

What is published of a merge names its inputs without their folders. `mats inspect --subspace` and
`mats report` find them again by this hidden file, which git and the hub are told to ignore.
"""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.source import local_path
from matsmerge.engine.prepared_merge import PreparedMerge
from matsmerge.errors import DataError
from matsmerge.files.guarded_files import read_json_as

PRIVATE = ".paths.json"


class PrivatePaths(BaseModel):
    """Local paths and hub ids, by the names of the models."""

    model_config = ConfigDict(frozen=True)

    base: str | None = None
    models: dict[str, str] = Field(default_factory=dict)
    statistics: dict[str, str] = Field(default_factory=dict)


def write_paths(prepared: PreparedMerge, folder: Path) -> None:
    """Write the paths of models, base and statistics into an output folder."""
    alignment = prepared.alignment
    base = prepared.pretrained or (alignment.base.checkpoint if alignment.base else None)
    pairs = zip(alignment.models, prepared.evidence, strict=False)
    paths = PrivatePaths(
        base=None if base is None else _found_at(base),
        models={m.name: at for m in alignment.models if (at := _found_at(m.checkpoint))},
        statistics={m.name: at for m, e in pairs if (at := _found_at(e.statistics.arrays))},
    )
    if paths == PrivatePaths():
        return
    (folder / PRIVATE).write_text(json.dumps(paths.model_dump(), indent=1) + "\n")
    (folder / ".gitignore").write_text(f"{PRIVATE}\n")


def read_paths(folder: Path | None) -> PrivatePaths:
    """Read the paths of a merge's inputs; empty for an output that came from elsewhere."""
    if folder is None or not (folder / PRIVATE).exists():
        return PrivatePaths()
    return read_json_as(folder / PRIVATE, PrivatePaths, DataError)


def _found_at(checkpoint: Checkpoint) -> str | None:
    """An absolute path, or a hub id; None for what was in memory."""
    if checkpoint.place is None:
        return None
    path = local_path(checkpoint.label)
    return str(path.absolute()) if path.exists() else checkpoint.label
