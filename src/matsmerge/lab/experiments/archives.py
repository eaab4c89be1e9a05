"""Files in the archives of packages: zip, tar (plain or packed) and deb.

Archives are known by their digests (`packages.py`): what is in them is what we have seen. They are
not unpacked by the names in them; members are read into memory.
"""

import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import BinaryIO

_DEB = b"!<arch>\n"


def read_members(archive: Path | bytes, *patterns: str) -> dict[str, bytes]:
    """Files of an archive whose names match any of the patterns, by name."""
    with io.BytesIO(archive) if isinstance(archive, bytes) else archive.open("rb") as file:
        members = _zip_members if zipfile.is_zipfile(file) else _tar_members
        return {
            name: read()
            for name, read in members(file)
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        }


def read_member(archive: Path | bytes, pattern: str) -> bytes:
    """The one file whose name matches."""
    (content,) = read_members(archive, pattern).values()
    return content


def _zip_members(file: BinaryIO) -> Iterator[tuple[str, Callable[[], bytes]]]:
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            yield name, partial(archive.read, name)


def _tar_members(file: BinaryIO) -> Iterator[tuple[str, Callable[[], bytes]]]:
    file.seek(0)
    if file.read(len(_DEB)) == _DEB:
        file = io.BytesIO(_data_of_deb(file))
    file.seek(0)
    with tarfile.open(fileobj=file) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name.removeprefix("./"), content.read


def _data_of_deb(file: BinaryIO) -> bytes:
    """A deb is an ar archive; the files to install are a tar archive in it."""
    while True:
        header = file.read(60)
        size = int(header[48:58])
        content = file.read(size + size % 2)
        if header.startswith(b"data.tar"):
            return content[:size]
