"""The outputs of steps: a folder each, complete or absent, and checked before it is used."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter

from matsmerge.engine.merge_file import MAX_BYTES, MAX_VALUES
from matsmerge.errors import DataError, MatsError
from matsmerge.files.guarded_files import Content, decode_text, parse_as, parse_json, read_bytes
from matsmerge.files.whole_outputs import put_in_place, remove, sync
from matsmerge.lab.experiments.provenance import origin
from matsmerge.lab.experiments.step import Given, Need, R, Step, digest_tree

RECORD = "step.json"


class Record(Content):
    """A step that is done, as `step.json` in its folder has it."""

    name: str
    kind: str
    key: str
    settings: Any
    seconds: float = Field(ge=0)
    found: Any  # the result; in the file as plain data
    origin: dict[str, Any]  # versions, commit and machine it was done with
    files: dict[str, str]  # digests


class Store:
    """The folder `steps` of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []  # what was damaged
        self._known: dict[str, Record] = {}

    def output(self, need: Need) -> Path:
        """The file or folder of a need that steps read."""
        return need.path if isinstance(need, Given) else self.path(need) / need.output

    def path(self, step: Step[Any]) -> Path:
        """A step's folder, now or later; the same step may have been named otherwise."""
        there = sorted(self.folder.glob(f"*-{step.key[:12]}"))
        return there[0] if there else self.folder / step.folder_name

    def partial(self, step: Step[Any]) -> Path:
        """The folder a step writes to; what an interrupted one left is there."""
        return self.folder / f".{step.folder_name}.partial"

    def load(self, step: Step[Any]) -> Record | None:
        """The record of a step; None if it is not done. What is damaged is thrown away."""
        if step.key not in self._known:
            path = self.path(step)
            if not path.exists():
                return None
            try:
                self._known[step.key] = _read(path, step)
            except _DamagedError as error:
                self.notes.append(f"{step.name}: its output was damaged ({error}); done again")
                remove(path)
                return None
        return self._known[step.key]

    def put(self, step: Step[R], found: R, seconds: float) -> None:
        """Record that a step is done, and move its output to its own name."""
        partial = self.partial(step)
        record = Record(
            name=step.name,
            kind=step.kind,
            key=step.key,
            settings=step.settings,
            seconds=round(seconds, 2),
            found=TypeAdapter(step.result).dump_python(found, mode="json"),
            origin=origin(),
            files=_digests(partial),
        )
        content = record.model_dump()
        content["digest"] = _digest(content)
        path = partial / RECORD
        path.write_text(json.dumps(content, indent=1))
        sync(path)
        put_in_place(partial, self.path(step), self.folder / f".{step.folder_name}.replaced")
        self._known[step.key] = record.model_copy(update={"found": found})


class _DamagedError(MatsError):
    """A step's output is not what was written."""


def _read(folder: Path, step: Step[Any]) -> Record:
    path = folder / RECORD
    if not path.is_file():
        raise _DamagedError(f"{RECORD} is missing")
    # What cannot be read just now is not thrown away.
    text = decode_text(read_bytes(path, DataError, MAX_BYTES), RECORD, _DamagedError)
    content = parse_json(text, RECORD, _DamagedError, most_values=MAX_VALUES)
    record = parse_as(content, Record, RECORD, _DamagedError)
    if content.pop("digest", None) != _digest(content) or record.key != step.key:
        raise _DamagedError(f"{RECORD} was changed")
    there = _digests(folder)
    for name in sorted(there.keys() | record.files.keys()):
        if there.get(name) != record.files.get(name):
            raise _DamagedError(f"{name} was changed, is missing or new")
    found = parse_as(record.found, step.result, RECORD, _DamagedError)
    return record.model_copy(update={"found": found})


def _digests(folder: Path) -> dict[str, str]:
    """Of all files but the record, by their names in the folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / RECORD)
    return {str(path.relative_to(folder)): digest_tree(path) for path in files}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
