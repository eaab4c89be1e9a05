"""From what the user names to a `Checkpoint`: file, folder, hub id, state dict or module."""

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel
from torch import Tensor, nn

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.hub import download
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint, load_pickled
from matsmerge.checkpoints.input_file import look_at
from matsmerge.checkpoints.safetensors_header import without_duplicates
from matsmerge.checkpoints.stored import StoredCheckpoint
from matsmerge.errors import CheckpointError
from matsmerge.files.guarded_files import parse_as, read_json

Source = str | Path | Mapping[str, Tensor] | nn.Module | Checkpoint

# In the order in which transformers and peft look for them.
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.bin",
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_NAME_BYTES = 255  # what file systems allow
_MAX_LISTED = 8
_MAX_QUOTED = 80


def open_checkpoint(source: Source, label: str | None = None) -> Checkpoint:
    """Open a checkpoint; only headers are read (and a hub id is downloaded).

    A string is a path if it exists, else a hub id with an optional `@revision`.
    """
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, (Mapping, nn.Module)):
        return InMemoryCheckpoint(label or type(source).__name__, source)
    label = label or str(source)
    path = local_path(source)
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{label}: cannot be read ({reason})") from error
    if not exists:
        name, _, revision = str(source).partition("@")
        if not _HUB_ID.fullmatch(name):
            raise CheckpointError(
                f"{label}: no such file or folder (a hub id would look like 'owner/name')"
            )
        path = download(name, revision or None)
    checkpoint = _open_folder(label, path) if path.is_dir() else _open_file(label, path, None)
    checkpoint.place = path
    if not checkpoint.specs:
        raise CheckpointError(f"{label}: holds no tensors")
    return checkpoint


def local_path(source: str | Path) -> Path:
    """A path with `~` replaced, where that names a user."""
    try:
        return Path(source).expanduser()
    except RuntimeError:
        return Path(source)


def _open_file(label: str, path: Path, folder: Path | None) -> Checkpoint:
    if path.suffix == ".safetensors":
        return StoredCheckpoint(label, [path], folder)
    if path.suffix in (".bin", ".pt", ".pth"):
        file = look_at(path)
        pickled = InMemoryCheckpoint(label, load_pickled(path), folder)
        pickled.files = [file]
        return pickled
    raise CheckpointError(f"{path}: expected .safetensors, .bin, .pt, .pth, or a folder")


def _open_folder(label: str, folder: Path) -> Checkpoint:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed ({error.strerror})") from error
    name = next((name for name in _WEIGHT_FILES if name in names), None)
    if name is None:
        others = [name for name in names if name.endswith(".safetensors")]
        if len(others) != 1:
            raise CheckpointError(
                f"{folder}: no model weights; expected one of {', '.join(_WEIGHT_FILES)}, "
                f"found {', '.join(names[:10]) or 'an empty folder'}"
            )
        name = others[0]
    path = contained(folder, name)
    if not name.endswith(".index.json"):
        return _open_file(label, path, folder)

    shards = _shards(folder, path)
    if name.startswith("model"):
        checkpoint: Checkpoint = StoredCheckpoint(label, list(shards), folder)
    else:
        state: dict[str, Tensor] = {}
        files = [look_at(shard) for shard in shards]
        for shard in shards:
            loaded = load_pickled(shard)
            if twice := state.keys() & loaded.keys():
                raise CheckpointError(
                    f"{shard}: tensor '{min(twice)}' is also in another shard; each tensor must be "
                    "in one shard only"
                )
            state |= loaded
        checkpoint = InMemoryCheckpoint(label, state, folder)
        checkpoint.files = files
    _check_index(path, shards, checkpoint)
    return checkpoint


class _Index(BaseModel, strict=True):
    weight_map: dict[str, str]  # tensor -> file that holds it


def _shards(folder: Path, index: Path) -> dict[Path, list[str]]:
    """The shards an index names, each with the tensors it should hold."""
    content = read_json(index, CheckpointError, object_pairs_hook=without_duplicates)
    weight_map = parse_as(content, _Index, f"{index}: not a checkpoint index", CheckpointError)
    tensors: dict[str, list[str]] = {}
    for tensor, name in weight_map.weight_map.items():
        tensors.setdefault(name, []).append(tensor)
    problems: list[str] = []
    shards: dict[Path, list[str]] = {}
    for name, own in tensors.items():
        if not _is_file_name(name):
            shown = name if len(name) <= _MAX_QUOTED else f"{name[:_MAX_QUOTED]}…"
            problems.append(f"{index}: points to {shown!r}, which is not a file name in its folder")
        elif not (folder / name).is_file():
            what = "not a regular file" if (folder / name).exists() else "missing"
            problems.append(f"{index}: points to shard '{name}', which is {what}")
        else:
            shards[contained(folder, name)] = own
    if problems:
        raise CheckpointError(_shortened(problems, str(index)))
    return shards


def _is_file_name(name: str) -> bool:
    """Can a file of this name be in a folder?"""
    is_plain = Path(name).name == name and name not in ("", "..") and "\0" not in name
    return is_plain and len(name.encode()) <= _MAX_NAME_BYTES


def _check_index(index: Path, shards: Mapping[Path, list[str]], checkpoint: Checkpoint) -> None:
    listed = {tensor for tensors in shards.values() for tensor in tensors}
    present = {*checkpoint.specs, *checkpoint.aliases}
    problems = [
        f"{index}: does not list '{name}', which a shard holds"
        for name in sorted(set(checkpoint.specs) - listed)
    ]
    problems += [
        f"{index}: lists '{name}', which no shard holds" for name in sorted(listed - present)
    ]
    if problems:
        raise CheckpointError(_shortened(problems, str(index)))


def _shortened(problems: list[str], where: str) -> list[str]:
    """The first of many problems, and how many there are besides."""
    left = len(problems) - _MAX_LISTED
    return [*problems[:_MAX_LISTED], f"{where}: and {left} more"] if left > 0 else problems


def contained(folder: Path, name: str) -> Path:
    """`folder/name`, unless a link leads out of the folder.

    The hub's cache keeps `snapshots/REVISION/file` as links to `blobs/`; those are followed.
    """
    path = folder / name
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle are a RuntimeError
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        allowed.append(folder.resolve().parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in allowed):
        raise CheckpointError(
            f"{path}: is a link to {target}, outside of its folder; copy the file into the folder"
        )
    return path
