"""Input files: size, time and inode, and a digest of all bytes, to notice changes."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from matsmerge.errors import CheckpointError
from matsmerge.files.guarded_files import open_regular, reading


@dataclass(frozen=True)
class InputFile:
    """A file as it was when it was opened.

    Not the number of its device, which may be another one after the machine was started again.
    """

    path: Path
    size: int
    modified_ns: int
    inode: int


def look_at(path: Path) -> InputFile:
    """The size, time of modification and inode that a file has now."""
    with reading(path, CheckpointError):
        found = path.stat()
    return InputFile(path, found.st_size, found.st_mtime_ns, found.st_ino)


def digest(path: Path) -> str:
    """SHA-256 of all of a file's bytes."""
    with reading(path, CheckpointError), open_regular(path, CheckpointError) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return hashlib.file_digest(file, "sha256").hexdigest()
