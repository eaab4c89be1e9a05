"""Archives of files: zip, tar (plain, gz, bz2, xz) and deb, read within limits.

They are never unpacked by the names in them: members are read into memory. A few kilobytes can
unpack to terabytes, and any byte can be damaged; both are errors that say what to do.
"""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from matsmerge.errors import DataError, MatsError
from matsmerge.files.guarded_files import quoted

MAX_BYTES = 400_000_000  # of what is read of one archive
MAX_UNPACKED_BYTES = 2_000_000_000  # of all of its members, most of which are passed over
MAX_MEMBERS = 100_000

_DEB = b"!<arch>\n"
_UNPACKING: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
_Member = tuple[str, int, Callable[[], bytes]]  # name, size, what reads it


def read_members(archive: Path | bytes, *patterns: str) -> dict[str, bytes]:
    """Files of an archive whose names match any of the patterns, by name.

    At least one for each pattern.
    """
    label = f"archive of {len(archive)} bytes" if isinstance(archive, bytes) else str(archive)
    found: dict[str, bytes] = {}
    num_bytes = 0
    with (
        refuse_damage(label),
        io.BytesIO(archive) if isinstance(archive, bytes) else archive.open("rb") as file,
    ):
        for name, size, read in _members(file):
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                num_bytes += size
                if num_bytes > MAX_BYTES:
                    raise DataError(
                        f"{label}: {quoted(name)}: more than {MAX_BYTES:,} bytes to read"
                    )
                found[name] = read()
                if len(found[name]) != size:
                    raise EOFError(f"{quoted(name)} is cut off")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise DataError(f"{label}: holds no file '{pattern}'")
    return found


def read_member(archive: Path | bytes, pattern: str) -> bytes:
    """The one file whose name matches."""
    found = read_members(archive, pattern)
    if len(found) > 1:
        raise DataError(f"'{pattern}': expected one file, found {', '.join(sorted(found))}")
    return found.popitem()[1]


def unzip(content: bytes, label: str) -> bytes:
    """The content of a gzip file."""
    with refuse_damage(label), gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        found = file.read(MAX_BYTES + 1)
    if len(found) > MAX_BYTES:
        raise DataError(f"{label}: more than {MAX_BYTES:,} bytes to read")
    return found


@contextmanager
def refuse_damage(label: str) -> Iterator[None]:
    """Make whatever readers of formats say of damaged files an error that says what to do."""
    try:
        yield
    except MatsError:
        raise
    except Exception as error:  # of zipfile, tarfile, zlib, lzma, Pillow: a dozen types
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{label}: cannot be read ({reason[:200]}); delete the package in the cache, and it is "
            "fetched again"
        ) from error


def _members(file: BinaryIO) -> Iterator[_Member]:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            _check_number(len(archive.infolist()))
            for info in archive.infolist():
                yield info.filename, info.file_size, partial(archive.read, info)
        return
    file.seek(0)
    if file.read(len(_DEB)) == _DEB:
        file = io.BytesIO(_data_of_deb(file))
    file.seek(0)
    first = file.read(6)
    file.seek(0)
    unpacking = next((u for magic, u in _UNPACKING.items() if first.startswith(magic)), None)
    limited: Any = _Limited(unpacking(file) if unpacking else file)
    with tarfile.open(fileobj=limited, mode="r:") as tar:
        for number, member in enumerate(tar):
            _check_number(number)
            if member.size < 0:  # which tarfile would follow backwards, for ever
                raise tarfile.ReadError(f"{quoted(member.name)} has a negative size")
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name.removeprefix("./"), member.size, content.read


def _check_number(num_members: int) -> None:
    if num_members > MAX_MEMBERS:
        raise ValueError(f"more than {MAX_MEMBERS:,} files")


class _Limited:
    """A file to read in pieces, of which neither one nor all are too large."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_BYTES or self._file.tell() > MAX_UNPACKED_BYTES:
            raise tarfile.ReadError(f"more than {MAX_BYTES:,} bytes in a piece")
        content: bytes = self._file.read(size)
        return content

    def seek(self, position: int) -> int:
        if not 0 <= position <= MAX_UNPACKED_BYTES:
            raise tarfile.ReadError(f"more than {MAX_UNPACKED_BYTES:,} bytes unpacked")
        found: int = self._file.seek(position)
        return found

    def tell(self) -> int:
        found: int = self._file.tell()
        return found


def _data_of_deb(file: BinaryIO) -> bytes:
    """A deb is an ar archive; the files to install are a tar archive in it."""
    while len(header := file.read(60)) == 60:
        name, size = header[:16].decode("ascii", "replace").strip(), header[48:58].strip()
        if not size.isdigit() or int(size) > MAX_BYTES:
            break
        content = file.read(int(size) + int(size) % 2)
        if name.startswith("data.tar"):
            return content
    raise tarfile.ReadError("a deb without data.tar")
