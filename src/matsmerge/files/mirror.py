"""The mirror: a local path for every remote file, with small files whole and large ones empty.

Beside each file the hidden `.NAME.remote` notes the size and version that it has in the store. A
file of another size than noted is a stand-in: so is every safetensors file, whose bytes come by
`RemoteFile`. A library that reads a stand-in by itself finds an empty file, never wrong values.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from matsmerge.files.remote_file import BLOCK_BYTES, RemoteFile, fetching, forget_blocks
from matsmerge.files.remote_names import url_of
from matsmerge.files.remote_store import RemoteState, look

_MAX_SMALL_BYTES = 32 * 2**20  # the largest tokenizers
_DEPTH = 2  # of a model's folder: heads are in a folder of their own
_NUM_AT_ONCE = 8  # blocks in memory
_STATE = TypeAdapter(RemoteState)

T = TypeVar("T")


def fetch_path(path: Path, *, whole: bool = False) -> Path:
    """Bring a path of the mirror up to date, and return it; any other path is left alone.

    Of a folder's files large ones are stand-ins, unless `whole`; then it has all its subfolders. A
    single file is whole, unless it holds tensors. What is not in the store is not there afterwards.
    """
    url = url_of(path)
    if url is None:
        return path
    found = look(url, None if whole else _DEPTH)
    if isinstance(found, RemoteState):
        if path.is_dir():  # it was a folder before
            _prune(path, {}, whole=True)
        _note(path, found)
        if path.suffix != ".safetensors":
            fetch_whole(path)
        return path
    wanted = {n: s for n, s in (found or {}).items() if _is_wanted(n, whole)}
    _prune(path, wanted, whole)
    for name, state in wanted.items():
        _note(path / name, state)
    files = {path / n: s.size for n, s in wanted.items() if whole or _is_small(n, s)}
    list(fetching().map(fetch_whole, (file for file, size in files.items() if size <= BLOCK_BYTES)))
    for file in files:  # larger ones, by several threads each
        fetch_whole(file)
    return path


def each_at_once(function: Callable[[Path], T], paths: Sequence[Path]) -> list[Callable[[], T]]:
    """Calls for the results of a function of each path; of remote ones several are under way."""
    return [
        fetching().submit(function, path).result if url_of(path) else partial(function, path)
        for path in paths
    ]


def remote_file(path: Path) -> RemoteFile | None:
    """The remote file that a stand-in is for; None for a file whose bytes are here."""
    url = url_of(path)
    state = None if url is None else _noted(path)
    if url is None or state is None or path.stat().st_size == state.size:
        return None
    return RemoteFile(url, state)


def fetch_whole(path: Path) -> Path:
    """Put all bytes of a file in the place of its stand-in."""
    remote = remote_file(path)
    if remote is None:
        return path
    size = remote.state.size
    temporary = path.with_name(f".{path.name}.{os.getpid()}.fetched")
    try:
        with temporary.open("wb") as file:
            if size <= BLOCK_BYTES:
                file.write(remote.read(0, size))
            else:
                starts = range(0, size, BLOCK_BYTES)
                stops = [min(start + BLOCK_BYTES, size) for start in starts]
                # One round of threads after the other, so that little is in memory.
                for i in range(0, len(starts), _NUM_AT_ONCE):
                    own = slice(i, i + _NUM_AT_ONCE)
                    for content in fetching().map(remote.read, starts[own], stops[own]):
                        file.write(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _is_wanted(name: str, whole: bool) -> bool:
    """Whether a file is mirrored at all: none that is hidden, of subfolders of a model weights."""
    parts = name.split("/")
    if any(part.startswith(".") or part == "" for part in parts):
        return False
    return whole or len(parts) == 1 or name.endswith(".safetensors")


def _is_small(name: str, state: RemoteState) -> bool:
    return state.size <= _MAX_SMALL_BYTES and not name.endswith(".safetensors")


def _note(path: Path, state: RemoteState) -> None:
    """Note what a file is now; if it has changed, it becomes a stand-in."""
    before = _noted(path)
    if before == state and path.is_file():
        return
    url = url_of(path)
    if before is not None and url is not None:
        forget_blocks(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, b"")  # first: whoever is killed here leaves a stand-in
    _replace(_note_of(path), _STATE.dump_json(state))


def _noted(path: Path) -> RemoteState | None:
    with suppress(FileNotFoundError, ValueError):
        return _STATE.validate_json(_note_of(path).read_bytes())
    return None


def _note_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.remote")


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.write_bytes(content)
    temporary.replace(path)


def _prune(path: Path, wanted: Mapping[str, RemoteState], whole: bool) -> None:
    """Remove what is no longer in the store; a file, too, where there is a folder now."""
    for gone in [path, *_mirrored(path, whole)]:
        if gone.is_file() and str(gone.relative_to(path)) not in wanted:
            gone.unlink(missing_ok=True)
            _note_of(gone).unlink(missing_ok=True)
    for folder in sorted([path, *path.rglob("*")], reverse=True):  # deeper ones first
        if folder.is_dir():
            with suppress(OSError):  # it holds something
                folder.rmdir()


def _mirrored(path: Path, whole: bool) -> Iterator[Path]:
    """The files of a folder that are mirrored, as deep as the store was looked at."""
    for note in path.rglob(".*.remote"):
        file = note.with_name(note.name.removeprefix(".").removesuffix(".remote"))
        if url_of(file) and (whole or len(file.relative_to(path).parts) <= _DEPTH):
            yield file
