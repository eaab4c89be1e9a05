"""Folders that appear when they are complete: written aside, kept from others, then renamed."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matsmerge.errors import OutputError


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


def sync(path: Path) -> None:
    """Wait until a file or folder has reached the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
