"""Files and folders that appear when they are complete, whenever the process is killed.

A file is written beside its name and renamed. A folder is made in the hidden folder
`.NAME.partial` beside it, which holds besides

    output/    what becomes the folder
    replaced/  what was under the folder's name before, until the new one is there

whatever its maker keeps to continue an interrupted run: a journal, checkpoints. For an output in a
remote store this folder is in the mirror, and `output` is uploaded when it is complete.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from matsmerge.errors import OutputError
from matsmerge.files.remote_names import url_of
from matsmerge.files.remote_store import put
from matsmerge.files.upload import UPLOADS, Put, upload_file, upload_folder
from matsmerge.progress import Progress

_OUTPUT, _REPLACED = "output", "replaced"


class StagedFolder:
    """A folder that is being made, by one run at a time."""

    def __init__(self, target: Path, work: str) -> None:
        self.target = target
        self.work = work  # named in errors
        self.path = staging_path(target).absolute()
        self.output = self.path / _OUTPUT
        self.is_open = False
        self._lock = contextlib.ExitStack()

    def open(self) -> None:
        """Make the hidden folder, and keep other runs out of it until `close`."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(held(self.path, self.work, self.target))
        self.is_open = True

    def clear(self, first: str = "", keep: frozenset[str] = frozenset()) -> None:
        """Remove what earlier runs left, the file `first` before all others."""
        for left_over in sorted(self.path.iterdir(), key=lambda path: path.name != first):
            if left_over.name not in keep:
                remove(left_over)

    def put_in_place(self, progress: Progress | None = None, put_file: Put = put) -> None:
        """Let the output appear under its name, once all of it has reached the disk or store."""
        if url_of(self.target):
            told, journal = progress or Progress(), self.path / UPLOADS
            upload_folder(self.output, self.target, journal, told, put_file)
            shutil.rmtree(self.output)
            return
        for path in (*self.output.rglob("*"), self.output):
            sync(path)
        put_in_place(self.output, self.target, self.path / _REPLACED)

    def discard(self, last: str = "") -> None:
        """Remove the hidden folder; a file `last` goes when all else is gone."""
        try:
            with contextlib.suppress(OSError):
                for left_over in sorted(self.path.iterdir(), key=lambda path: path.name == last):
                    with contextlib.suppress(OSError):
                        remove(left_over)
                self.path.rmdir()
        finally:  # holding the lock until here keeps others from filling the folder
            self.close()

    def close(self) -> None:
        """Let other runs in."""
        self.is_open = False
        self._lock.close()


def staging_path(target: Path) -> Path:
    """Where a folder is made until it is complete."""
    return target.with_name(f".{target.name}.partial")


def is_interrupted(target: Path) -> bool:
    """Whether the hidden folder beside a target holds something to continue, or to lose."""
    staging = staging_path(target)
    if not staging.is_dir():
        return staging.exists()
    return any(path.name != _REPLACED for path in staging.iterdir())


@contextmanager
def held(folder: Path, work: str, target: Path | None = None) -> Iterator[None]:
    """Lock a folder against other runs; an `OutputError` if one is writing the target there."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            busy = f"{target or folder}: another {work} is writing it just now"
            raise OutputError(busy) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
                raise
        yield
    finally:
        os.close(lock)


def put_in_place(made: Path, target: Path, replaced: Path) -> None:
    """Rename a folder; what was under its name before goes to `replaced`, and is then removed."""
    if target.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        target.rename(replaced)
    try:
        made.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    sync(target.absolute().parent)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes its name when it is complete and has reached the disk."""
    temporary = temporary_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            yield file
        sync(temporary)
        if url_of(path):
            upload_file(temporary, path)
        else:
            temporary.replace(path)
            sync(path.parent)
    finally:  # also when interrupted
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def temporary_path(file: Path) -> Path:
    """The name of a file while it is written; always the same, so that the next run replaces it."""
    return file.with_name(f".{file.name}.tmp")


def put_text(path: Path, text: str) -> None:
    """Write a small file; whenever the process dies, it is the old one or the new one, whole."""
    with whole_file(path) as file:
        file.write(text.encode())


def put_bytes(path: Path, content: bytes) -> None:
    """Write a file that a user asked for; an `OutputError` if the system refuses."""
    with writing(path), whole_file(path) as file:
        file.write(content)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the system while writing into an `OutputError` that names the output."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or error
        raise OutputError(f"{path}: cannot be written ({reason})") from error


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file or folder has reached the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
