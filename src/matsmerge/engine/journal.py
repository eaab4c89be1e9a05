"""The journal of a merge, read: what is merged, and which jobs have reached the disk."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from matsmerge.engine.input_files import FileNote
from matsmerge.engine.worker import Receipt
from matsmerge.errors import OutputError
from matsmerge.files.guarded_files import parse_as
from matsmerge.files.journal_file import line_of, read_journal_lines

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
    """The content of a journal."""

    identity: str
    inputs: list[FileNote]
    measured: dict[str, Any] | None = None
    finished: dict[int, Receipt] = field(default_factory=dict)
    num_bytes: int = 0  # of the journal, without a torn line


def read_journal(path: Path) -> Noted | None:
    """Read a journal; None if there is none, or its first line was never completed."""
    lines, num_bytes = read_journal_lines(path)
    noted: Noted | None = None
    for number, entry in enumerate(lines, 1):
        line = parse_as(entry, _Line, line_of(path, number), OutputError)
        if noted is None:
            if line.identity is None or line.inputs is None:
                raise OutputError(f"{line_of(path, 1)} (it does not say what it is of)")
            noted = Noted(line.identity, line.inputs, num_bytes=num_bytes)
        noted.measured = line.measured if line.measured is not None else noted.measured
        for job, (squares, solved, energies) in line.jobs.items():
            noted.finished[job] = Receipt(job, list(squares), dict(solved), dict(energies))
    return noted
