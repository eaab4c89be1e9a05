"""Folders that appear when they are complete: written aside, kept from others, then renamed."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matsmerge.errors import OutputError

# What is put around a name at most while its file or folder is written: `.NAME.partial`, say.
_AFFIX_BYTES = 32
_MAX_NAME_BYTES = 255


def hold(folder: Path) -> int | None:
    """Keep other runs out of a folder until the descriptor is closed; None if nothing can.

    A `BlockingIOError` if another run is in it.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
            os.close(lock)
            raise
    return lock


@contextmanager
def held(folder: Path, busy: str) -> Iterator[None]:
    """Keep other runs out of a folder for a while; an `OutputError` if one is in it already."""
    try:
        lock = hold(folder)
    except BlockingIOError as error:
        raise OutputError(busy) from error
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def name_problems(target: Path) -> list[str]:
    """Problems with the name of an output, such as one too long for the file system."""
    at_most = _MAX_NAME_BYTES
    try:
        if "\0" in str(target):
            raise OSError(errno.EINVAL, "a zero byte in its name")
        target.exists()
        parent = next((p for p in target.absolute().parents if p.exists()), target)
        at_most = os.pathconf(parent, "PC_NAME_MAX") if hasattr(os, "pathconf") else at_most
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            return [f"{target}: cannot be written to ({error.strerror}); choose another --out"]
    longest = max((len(os.fsencode(part)) for part in target.parts), default=0)
    own = len(os.fsencode(target.name)) + _AFFIX_BYTES
    if max(longest, own) <= at_most:
        return []
    return [
        f"{target}: has a name that is too long; this file system allows {at_most} bytes, "
        f"{_AFFIX_BYTES} of which are needed while it is written; choose another --out"
    ]


def is_vacant(target: Path) -> bool:
    """Can a folder be put here without anything being lost? An empty folder is like none.

    Not one that a disk is mounted on: no other folder can take its place.
    """
    if target.is_symlink() or os.path.ismount(target):
        return False
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


def put_in_place(made: Path, target: Path, replaced: Path) -> None:
    """Let a folder appear under its name; what was there goes to `replaced`, for the caller."""
    if target.exists():
        target.rename(replaced)
    try:
        made.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    sync(target.absolute().parent)


def put_text(path: Path, text: str) -> None:
    """Write a small file; whenever the process dies, it is the old one or the new one, whole."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def sync(path: Path) -> None:
    """Wait until a file or folder has reached the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
