"""Text files of rows, plain or gzipped, that are measured before anything of them is kept.

A gzip file of a megabyte can hold a gigabyte of zeros, a file of megabytes millions of empty
objects. One pass in small pieces finds out how much there is, and that it is UTF-8; what no data
looks like is refused then, and what is left can be read line by line.
"""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from matsmerge.errors import DataError
from matsmerge.files.guarded_files import open_regular

MAX_LINE_BYTES = 4 * 2**20  # a long book, or an image of 700 x 500 written as numbers
_MAX_TEXT_BYTES = 2**30
_MAX_LINES = 5_000_000
_MAX_OPENING = 10_000_000  # brackets and braces, each of which may begin a list or an object
# Text rarely becomes a tenth by gzip. What is small does no harm however well it compresses.
_MAX_RATIO, _SMALL_BYTES = 20, 64 * 2**20
_PIECE = 2**20


@dataclass(frozen=True)
class MeasuredText:
    """A file that is UTF-8 text of a reasonable size, decompressed if its name ends in .gz."""

    path: Path
    num_bytes: int

    @contextmanager
    def opened(self, newline: str) -> Iterator[IO[str]]:
        with _errors(self.path), _opened(self.path) as file:
            yield io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline)


def measure_text(path: Path, *, has_lines: bool = True) -> MeasuredText:
    """Refuse what is no text, or too much; a file that `has_lines` also for one that is too long.

    Nothing is kept, so that refusing takes no memory.
    """
    with _errors(path), _opened(path) as file:
        stored_bytes = path.stat().st_size
        most = max(_SMALL_BYTES, _MAX_RATIO * stored_bytes)
        decoder = codecs.getincrementaldecoder("utf-8")()
        num_bytes = num_lines = num_opening = line_bytes = 0
        while piece := file.read(_PIECE):
            _check_utf8(path, decoder, piece, num_bytes, num_lines)
            num_bytes += len(piece)
            num_opening += piece.count(b"[") + piece.count(b"{")
            lines = piece.replace(b"\r", b"\n").split(b"\n")
            longest = max(line_bytes + len(lines[0]), *map(len, lines))
            line_bytes = len(lines[-1]) + (line_bytes if len(lines) == 1 else 0)
            if has_lines and longest > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}: line {num_lines + 1} or one soon after it has more than "
                    f"{MAX_LINE_BYTES:,} bytes, which no row should have; are its lines rows? Cut "
                    "long texts, and give images as files of their own"
                )
            num_lines += max(piece.count(b"\n"), piece.count(b"\r"))
            for num, limit, what in (
                (num_bytes, _MAX_TEXT_BYTES, "bytes of text"),
                (num_lines, _MAX_LINES, "lines"),
                (num_opening, _MAX_OPENING, "values"),
            ):
                if num > limit:
                    raise DataError(
                        f"{path}: has more than {limit:,} {what}; take a part of it "
                        "(head -n 1000000), or convert it to Parquet"
                    )
            if num_bytes > most:
                raise DataError(
                    f"{path}: {stored_bytes:,} bytes decompress to more than {most:,}, "
                    f"{_MAX_RATIO} times as much, which text hardly does; if it is what it should "
                    "be, decompress it first (gunzip)"
                )
        _check_utf8(path, decoder, b"", num_bytes, num_lines)
    return MeasuredText(path, num_bytes)


def _check_utf8(
    path: Path, decoder: codecs.IncrementalDecoder, piece: bytes, before: int, num_lines: int
) -> None:
    held = decoder.getstate()[0]
    try:
        decoder.decode(piece, final=not piece)
    except UnicodeDecodeError as error:
        content = held + piece
        position = before - len(held) + error.start
        line = num_lines + content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}: line {line}: expected UTF-8 text, found the byte "
            f"0x{content[error.start]:02x} at position {position}; convert the file to UTF-8"
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with open_regular(path, DataError) as file:
        if path.suffix.lower() != ".gz":
            yield file
            return
        with gzip.GzipFile(fileobj=file) as decompressed:
            yield decompressed  # type: ignore[misc]


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except EOFError as error:
        raise DataError(f"{path}: is cut short; copy or download it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a valid gzip file ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
