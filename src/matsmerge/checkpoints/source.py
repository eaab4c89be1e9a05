"""Opening what the user names as a `Checkpoint`: file, folder, hub id, state dict or module."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel
from torch import Tensor, nn

from matsmerge.checkpoints.checkpoint import Checkpoint, first_line
from matsmerge.checkpoints.decoded_checkpoint import decode_checkpoint
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint, load_pickled
from matsmerge.checkpoints.input_file import look_at
from matsmerge.checkpoints.stored import StoredCheckpoint
from matsmerge.errors import CheckpointError
from matsmerge.files.guarded_files import local_path as local_path
from matsmerge.files.guarded_files import parse_as, quoted, read_json, reading
from matsmerge.files.mirror import fetch_path
from matsmerge.files.remote_names import url_of
from matsmerge.problems import shortened

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
# What belongs to a model besides its weights.
COMPANION_PATTERNS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
_INDEX = ".index.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_GGUF = (
    "GGUF is a format to run models in, mostly quantized; merge the safetensors models it was made "
    "from, and convert the result with llama.cpp's convert_hf_to_gguf.py"
)
_MAX_NAME_BYTES = 255  # what file systems allow


def open_checkpoint(source: Source, label: str | None = None) -> Checkpoint:
    """Open a checkpoint; only headers are read (and a hub id is downloaded).

    A string is a URL, a path if it exists, or else a hub id with an optional `@revision`.
    """
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, (Mapping, nn.Module)):
        return decode_checkpoint(InMemoryCheckpoint(label or type(source).__name__, source))
    path = local_path(source)
    url = url_of(path)
    label = label or url or str(source)
    with reading(label, CheckpointError):
        exists = fetch_path(path).exists()
    if not exists and url is not None:
        raise CheckpointError(f"{label}: no such file or folder in that store")
    if not exists:
        name, _, revision = str(source).partition("@")
        if not _HUB_ID.fullmatch(name):
            raise CheckpointError(
                f"{label}: no such file or folder (a hub id would look like 'owner/name')"
            )
        path = _download(name, revision or None)
    if path.is_dir():
        checkpoint = _open_folder(label, path)
    else:
        checkpoint = _open_files(label, [path], None, path.suffix)
    checkpoint.place = path
    if not checkpoint.specs:
        raise CheckpointError(f"{label}: holds no tensors")
    return decode_checkpoint(checkpoint)


def _download(name: str, revision: str | None) -> Path:
    """Download `owner/name` (or find it in the cache) and return its folder.

    Safetensors are preferred; pickled weights are fetched only where there is nothing else.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        for weights in ("*.safetensors", "*.bin"):
            wanted = [*COMPANION_PATTERNS, weights]
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
            if any(folder.glob(weights)):
                break
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(
            f"{name}: no such local path, and the hub did not provide it{at} "
            f"({first_line(error)}); check the spelling, the network, "
            "and `hf auth login` for a private model"
        ) from error
    return folder


def resolved(source: str) -> str:
    """The absolute path of a source that is a local path; any other source as it is."""
    path = local_path(source)
    try:
        return str(path.resolve()) if path.exists() else source
    except OSError:  # opening it will say what is wrong
        return source


def _open_files(label: str, paths: Sequence[Path], folder: Path | None, kind: str) -> Checkpoint:
    """A checkpoint in one file, or in the shards of one model; `kind` is their suffix."""
    if kind == ".safetensors":
        return StoredCheckpoint(label, paths, folder)
    if kind == ".gguf":
        raise CheckpointError(f"{paths[0]}: {_GGUF}")
    if kind not in (".bin", ".pt", ".pth"):
        raise CheckpointError(f"{paths[0]}: expected .safetensors, .bin, .pt, .pth, or a folder")
    files = [look_at(path) for path in paths]
    state: dict[str, Tensor] = {}
    for path in paths:
        loaded = load_pickled(path)
        if twice := state.keys() & loaded.keys():
            raise CheckpointError(
                f"{path}: tensor '{min(twice)}' is also in another shard; each tensor must be in "
                "one shard only"
            )
        state |= loaded
    pickled = InMemoryCheckpoint(label, state, folder)
    pickled.files = files
    return pickled


def _open_folder(label: str, folder: Path) -> Checkpoint:
    with reading(folder, CheckpointError):
        names = sorted(entry.name for entry in folder.iterdir())
    name = next((name for name in _WEIGHT_FILES if name in names), None)
    if name is None:
        others = [name for name in names if name.endswith(".safetensors")]
        if not others and any(name.endswith(".gguf") for name in names):
            raise CheckpointError(f"{folder}: {_GGUF}")
        if len(others) != 1:
            raise CheckpointError(
                f"{folder}: no model weights; expected one of {', '.join(_WEIGHT_FILES)}, "
                f"found {', '.join(names[:10]) or 'an empty folder'}"
            )
        name = others[0]
    path = contained(folder, name)
    if not name.endswith(_INDEX):
        return _open_files(label, [path], folder, path.suffix)

    found = read_json(path, CheckpointError, unique=True)
    content = parse_as(found, _Index, f"{path}: not a checkpoint index", CheckpointError)
    shards = [contained(folder, name) for name in _shard_names(folder, path, content)]
    kind = Path(name.removesuffix(_INDEX)).suffix
    checkpoint = _open_files(label, shards, folder, kind)
    listed, present = content.weight_map.keys(), {*checkpoint.specs, *checkpoint.aliases}
    lacking = [f"lists '{n}', which no shard holds" for n in sorted(listed - present)]
    unlisted = sorted(checkpoint.specs.keys() - listed)
    extra = [f"does not list '{n}', which a shard holds" for n in unlisted]
    CheckpointError.raise_all(shortened([f"{path}: {problem}" for problem in (*extra, *lacking)]))
    return checkpoint


class _Index(BaseModel, strict=True):
    weight_map: dict[str, str]  # tensor -> file that holds it


def _shard_names(folder: Path, index: Path, content: _Index) -> list[str]:
    """The files that an index names; each must be a file in its folder."""
    names = list(dict.fromkeys(content.weight_map.values()))
    problems = []
    for name in names:
        if not _is_file_name(name):
            problems.append(f"points to {quoted(name)}, which is not a file name in its folder")
        elif not (folder / name).is_file():
            what = "not a regular file" if (folder / name).exists() else "missing"
            problems.append(f"points to shard '{name}', which is {what}")
    CheckpointError.raise_all(shortened([f"{index}: {problem}" for problem in problems]))
    return names


def _is_file_name(name: str) -> bool:
    """Whether a file in a folder can have this name."""
    is_plain = Path(name).name == name and name not in ("", "..") and "\0" not in name
    return is_plain and len(name.encode()) <= _MAX_NAME_BYTES


def contained(folder: Path, name: str) -> Path:
    """`folder/name`, unless a link leads out of the folder.

    The hub's cache keeps `snapshots/REVISION/file` as links to `blobs/`; those are followed.
    """
    path = folder / name
    with reading(path, CheckpointError):
        target = path.resolve()
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        allowed.append(folder.resolve().parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in allowed):
        raise CheckpointError(
            f"{path}: is a link to {target}, outside of its folder; copy the file into the folder"
        )
    return path
