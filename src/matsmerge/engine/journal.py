"""The journal of a merge: what it is a merge of, and which of its jobs have reached the disk.

Every line is a JSON object with a checksum. Only the last one may be torn, by the death of the
run that was writing it, and is then forgotten; anything else is damage.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from matsmerge.engine.input_files import FileNote
from matsmerge.engine.worker import Receipt
from matsmerge.errors import OutputError
from matsmerge.guarded_files import parse_as, parse_json, read_bytes

_MAX_BYTES = 256 * 2**20
_ADVICE = "start anew with --overwrite"

_Number = int | float  # as it was: a number that becomes another type is written differently


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    identity: str | None = None
    inputs: list[FileNote] | None = None
    measured: dict[str, dict[str, list[_Number]]] | None = None
    # By job: squares, what is to say of solved layers, energies.
    jobs: dict[int, tuple[list[_Number], dict[str, list[dict[str, Any]]], dict[str, _Number]]] = {}


@dataclass
class Noted:
    """What a journal says."""

    identity: str
    inputs: list[FileNote]
    measured: dict[str, Any] | None = None
    finished: dict[int, Receipt] = field(default_factory=dict)
    num_bytes: int = 0  # of the journal, without a torn line


def read_journal(path: Path) -> Noted | None:
    """What is in a journal; None if there is none, or its first line was never completed."""
    if not os.path.lexists(path):
        return None
    content = read_bytes(path, OutputError, _MAX_BYTES)
    noted: Noted | None = None
    position = 0
    lines = content.splitlines(keepends=True)  # bytes: at \n, \r and \r\n only
    for number, raw in enumerate(lines, 1):
        if not raw.endswith(b"\n"):
            break
        line = _parse(raw, f"{path}: line {number}: damaged, {_ADVICE}", 1 < number == len(lines))
        if line is None:
            break
        position += len(raw)
        if noted is None:
            if line.identity is None or line.inputs is None:
                raise OutputError(f"{path}: does not say what it is of; {_ADVICE}")
            noted = Noted(line.identity, line.inputs)
        noted.measured = line.measured if line.measured is not None else noted.measured
        for job, (squares, solved, energies) in line.jobs.items():
            noted.finished[job] = Receipt(job, tuple(squares), solved, energies)
        noted.num_bytes = position
    return noted


def _parse(raw: bytes, where: str, may_be_torn: bool) -> _Line | None:
    """A line; None if it may be torn and is."""
    try:
        content = parse_json(raw.decode(), where, OutputError)
    except (UnicodeDecodeError, OutputError) as error:
        if may_be_torn:
            return None
        raise OutputError(f"{where} (no JSON in UTF-8)") from error
    check = content.pop("check", None) if isinstance(content, dict) else None
    line = parse_as(content, _Line, where, OutputError)
    if check != _checksum(json.dumps(content)):
        raise OutputError(f"{where} (its checksum does not fit)")
    return line


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


class JournalWriter:
    """A journal that is being written; what was noted has reached the disk."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    @classmethod
    def begin(cls, path: Path, identity: str, inputs: Sequence[FileNote]) -> "JournalWriter":
        """A new journal."""
        writer = cls(path.open("x", encoding="utf-8"))
        writer._note({"identity": identity, "inputs": [note.model_dump() for note in inputs]})
        return writer

    @classmethod
    def resume(cls, path: Path, noted: Noted) -> "JournalWriter":
        """Go on with a journal, without its torn line."""
        os.truncate(path, noted.num_bytes)
        return cls(path.open("a", encoding="utf-8"))

    def note_measured(self, measured: Mapping[str, Any]) -> None:
        self._note({"measured": measured})

    def note_jobs(self, receipts: Iterable[Receipt]) -> None:
        self._note({"jobs": {r.job_index: [r.squares, r.solved, r.energies] for r in receipts}})

    def _note(self, entry: Mapping[str, Any]) -> None:
        text = json.dumps(entry)
        self._file.write(f'{text[:-1]}, "check": {_checksum(text)}}}\n')
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
