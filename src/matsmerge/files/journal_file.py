"""A journal: a file whose lines say what a run is of and what it has done, to continue it later.

Every line is a JSON object with a checksum, and on the disk before the work goes on. Only the last
one may be torn, by the death of the run that was writing it, and is then forgotten; anything else
is damage.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from matsmerge.errors import OutputError
from matsmerge.files.guarded_files import parse_json, read_bytes

_MAX_BYTES = 256 * 2**20


class JournalFile:
    """A journal that lines are added to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def begin(cls, path: Path, first: Mapping[str, Any]) -> Self:
        """Start a new journal; one whose first line is not whole counts as none."""
        path.unlink(missing_ok=True)
        journal = cls(path)
        journal.note(first)
        return journal

    @classmethod
    def resume(cls, path: Path, num_bytes: int) -> Self:
        """Continue a journal after the bytes that were read, cutting off a torn line."""
        os.truncate(path, num_bytes)
        return cls(path)

    def note(self, entry: Mapping[str, Any]) -> None:
        """Add a line, and wait until it has reached the disk."""
        text = json.dumps(entry)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f'{text[:-1]}, "check": {_checksum(text)}}}\n')
            file.flush()
            os.fsync(file.fileno())


def read_journal_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All whole lines and their number of bytes; none if there is no journal."""
    entries: list[dict[str, Any]] = []
    num_bytes = 0
    if not os.path.lexists(path):
        return entries, num_bytes
    lines = read_bytes(path, OutputError, _MAX_BYTES).splitlines(keepends=True)
    for number, raw in enumerate(lines, 1):
        if not raw.endswith(b"\n"):
            break
        entry = _parse(raw, line_of(path, number), may_be_torn=1 < number == len(lines))
        if entry is None:
            break
        entries.append(entry)
        num_bytes += len(raw)
    return entries, num_bytes


def line_of(path: Path, number: int) -> str:
    """The beginning of a message about a damaged line, with what to do about it."""
    return f"{path}: line {number}: damaged, start anew with --overwrite"


def _parse(raw: bytes, where: str, may_be_torn: bool) -> dict[str, Any] | None:
    """The content of a line; None if it is torn, where it may be."""
    try:
        content = parse_json(raw.decode(), where, OutputError)
    except (UnicodeDecodeError, OutputError) as error:
        if may_be_torn:
            return None
        raise OutputError(f"{where} (no JSON in UTF-8)") from error
    if not isinstance(content, dict):
        raise OutputError(f"{where} (expected a mapping)")
    if content.pop("check", None) != _checksum(json.dumps(content)):
        raise OutputError(f"{where} (its checksum does not fit)")
    return content


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())
