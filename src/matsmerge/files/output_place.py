"""Checks of the place that an output is to be written to, before any work is done."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

from matsmerge.byte_sizes import format_bytes
from matsmerge.errors import OutputError
from matsmerge.files.mirror import fetch_path
from matsmerge.files.remote_names import url_of
from matsmerge.files.upload import UPLOADS
from matsmerge.files.whole_outputs import is_interrupted, staging_path

# What is put around a name at most while its file or folder is written: `.NAME.partial`, say.
_AFFIX_BYTES = 32
_MAX_NAME_BYTES = 255

P = ParamSpec("P")


def _raising(
    find: Callable[Concatenate[Path, P], Iterator[str]],
) -> Callable[Concatenate[Path, P], None]:
    """Turn a function that yields problems with a target into one that raises them together."""

    @wraps(find)
    def check(target: Path, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            problems = _name_problems(target) or [
                *_store_problems(target),
                *find(fetch_path(target), *args, **kwargs),
            ]
        except (OSError, RuntimeError) as error:  # links in a circle are a RuntimeError
            reason = getattr(error, "strerror", None) or error
            problems = [f"{target}: cannot be written to ({reason}); choose another --out"]
        OutputError.raise_all(problems)

    return check


@_raising
def check_folder(
    target: Path,
    work: str,
    is_ours: Callable[[Path], bool],
    *,
    inputs: Mapping[str, Path] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    is_finished: Callable[[Path], bool] = lambda _: False,
) -> Iterator[str]:
    """Refuse a folder that must not or cannot be written.

    Only what `is_ours`, the output of such `work`, is ever replaced; never what overlaps with
    `inputs`. `is_finished` says whether an interrupted run had put its output in place already.
    """
    if not target.name or target.is_symlink():
        yield f"{target}: is not the name of a folder to make; choose another --out"
        return
    place = target.resolve()
    for label, used in (inputs or {}).items():
        if place.is_relative_to(used.resolve()) or used.resolve().is_relative_to(place):
            yield f"{target}: overlaps with the input {label}; choose another --out"
            return
    is_half_there = (staging_path(target) / UPLOADS).exists()
    if not is_vacant(target) and not is_half_there:
        if not is_ours(target):
            yield f"{target}: exists and holds no {work} of ours; choose another --out"
        elif not (overwrite or (resume and is_finished(target))):
            yield f"{target}: exists already; replace it with --overwrite"
    if not (overwrite or resume) and is_interrupted(target) and not is_finished(target):
        yield (
            f"{target}: an earlier {work} was interrupted; continue it with --resume, or start "
            "anew with --overwrite"
        )
    yield from _parent_problems(target)


@_raising
def check_file(
    target: Path,
    *suffixes: str,
    overwrite: bool = False,
    may_exist: Callable[[Path], bool] = lambda _: False,
) -> Iterator[str]:
    """Refuse a file that must not or cannot be written, or whose name has none of the suffixes."""
    if suffixes and target.suffix not in suffixes:
        yield f"{target}: the name of this file ends in {' or '.join(suffixes)}"
    if target.is_dir():
        yield f"{target}: is a folder, expected the name of a file to write"
    elif target.exists() and not overwrite and not may_exist(target):
        yield f"{target}: exists already; replace it with --overwrite"
    yield from _parent_problems(target)


def check_room(target: Path, num_bytes: int) -> None:
    """Refuse an output that is larger than the free space on its disk."""
    parent = nearest_folder(target)
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise OutputError(
            f"{parent}: not enough disk space, {format_bytes(num_bytes)} needed and "
            f"{format_bytes(free)} free"
        )


def is_vacant(target: Path) -> bool:
    """Whether a folder can be put here without anything being lost. An empty folder is like none.

    Not one that a disk is mounted on: no other folder can take its place.
    """
    if target.is_symlink() or os.path.ismount(target):
        return False
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


def _parent_problems(target: Path) -> Iterator[str]:
    parent = nearest_folder(target)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        yield f"{parent}: cannot be written to; choose another --out"


def nearest_folder(target: Path) -> Path:
    """The nearest folder above that exists; those in between are made with the output."""
    return next(p for p in target.resolve().parents if p.exists())


def _store_problems(target: Path) -> Iterator[str]:
    if (url_of(target) or "").startswith("http"):
        yield f"{target}: can be read and not written to; choose another --out"


def _name_problems(target: Path) -> list[str]:
    """What is wrong with a name, such as that it is too long for the file system."""
    if "\0" in str(target):
        raise OSError(errno.EINVAL, "a zero byte in its name")
    at_most = _MAX_NAME_BYTES
    try:
        target.exists()
        parent = next((p for p in target.absolute().parents if p.exists()), target)
        at_most = os.pathconf(parent, "PC_NAME_MAX")
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
    longest = max((len(os.fsencode(part)) for part in target.parts), default=0)
    own = len(os.fsencode(target.name)) + _AFFIX_BYTES
    if max(longest, own) <= at_most:
        return []
    return [
        f"{target}: has a name that is too long; this file system allows {at_most} bytes, "
        f"{_AFFIX_BYTES} of which are needed while it is written; choose another --out"
    ]
