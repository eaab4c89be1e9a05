"""Input files: size, time and inode, and a digest of all bytes, to notice changes."""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from matsmerge.errors import CheckpointError
from matsmerge.files.guarded_files import open_regular, reading
from matsmerge.files.mirror import remote_file
from matsmerge.files.remote_names import url_of
from matsmerge.files.remote_store import RemoteState, look


@dataclass(frozen=True)
class InputFile:
    """A file as it was when it was opened.

    Not the number of its device, which may be another one after the machine was started again. A
    remote file has instead of an inode a number made from the version that its store gives it, or 0
    if that gives none.
    """

    path: Path
    size: int
    modified_ns: int
    inode: int


def look_at(path: Path) -> InputFile:
    """The size, time of modification and inode that a file has now."""
    with reading(path, CheckpointError):
        if url := url_of(path):
            state = look(url)
            if not isinstance(state, RemoteState):
                raise CheckpointError(f"{path}: is no longer in its store")
            version = hashlib.sha256(state.version.encode()).digest()
            return InputFile(
                path, state.size, 0, int.from_bytes(version[:7]) if state.version else 0
            )
        found = path.stat()
    return InputFile(path, found.st_size, found.st_mtime_ns, found.st_ino)


def has_versions(files: Iterable[InputFile]) -> bool:
    """Whether some files are in a store, and that gives a version to each of them."""
    remote = [file for file in files if url_of(file.path)]
    return bool(remote) and all(file.inode for file in remote)


def digest(path: Path) -> str:
    """SHA-256 of all of a file's bytes."""
    if remote := remote_file(path):
        found = hashlib.sha256()
        with reading(path, CheckpointError):
            for content in remote.blocks():
                found.update(content)
        return found.hexdigest()
    with reading(path, CheckpointError), open_regular(path, CheckpointError) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return hashlib.file_digest(file, "sha256").hexdigest()
