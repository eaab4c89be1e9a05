"""The outputs of steps: a folder each, complete or absent, and checked before it is used."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from pydantic import Field, TypeAdapter

from matsmerge.engine.merge_file import MAX_BYTES, MAX_VALUES
from matsmerge.errors import DataError, MatsError
from matsmerge.files.guarded_files import Content, decode, parse_as, parse_json, read_bytes
from matsmerge.files.whole_outputs import put_in_place, remove, sync
from matsmerge.lab.experiments.provenance import origin
from matsmerge.lab.experiments.step import Given, Need, R, Step, digest

RECORD = "step.json"


@dataclass(frozen=True)
class Record(Generic[R]):
    """A step that is done: its result, and how long it took."""

    found: R
    seconds: float
    origin: Mapping[str, Any]  # versions, commit and machine it was done with


class Store:
    """The folder `steps` of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []  # what was damaged
        self._known: dict[str, Record[Any]] = {}

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

    def found(self, step: Step[R]) -> R:
        """The result of a step that is done."""
        record = self.load(step)
        assert record is not None, "a step is done after those it needs"
        return record.found

    def load(self, step: Step[R]) -> Record[R] | None:
        """The record of a step; None if it is not done. What is damaged is thrown away."""
        if step.key not in self._known:
            path = self.path(step)
            if not path.exists():
                return None
            try:
                self._known[step.key] = _read(path, step)
            except (FileNotFoundError, NotADirectoryError, ValueError, _DamagedError) as error:
                self.notes.append(f"{step.name}: its output was damaged ({error}); done again")
                remove(path)
                return None
        return self._known[step.key]

    def put(self, step: Step[R], found: R, seconds: float) -> None:
        """Let a step's output appear under its name."""
        partial = self.partial(step)
        content: dict[str, Any] = {
            "name": step.name,
            "kind": step.kind,
            "key": step.key,
            "settings": step.settings,
            "seconds": round(seconds, 2),
            "found": TypeAdapter(step.result).dump_python(found, mode="json"),
            "origin": origin(),
            "files": {str(p.relative_to(partial)): digest(p) for p in _files(partial)},
        }
        content["digest"] = _digest(content)
        record = partial / RECORD
        record.write_text(json.dumps(content, indent=1))
        sync(record)
        target = self.path(step)
        put_in_place(partial, target, self.folder / f".{step.folder_name}.replaced")
        self._known[step.key] = Record(found, content["seconds"], content["origin"])


class _RecordContent(Content):
    key: str
    digest: str
    found: Any
    seconds: float = Field(ge=0)
    origin: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, str]


class _DamagedError(MatsError):
    """A step's record is not what was written."""


def _read(path: Path, step: Step[R]) -> Record[R]:
    record = path / RECORD
    if not record.is_file():
        raise FileNotFoundError(f"{RECORD} is missing")
    # What cannot be read just now is not thrown away.
    text = read_bytes(record, DataError, MAX_BYTES)
    content = parse_json(
        decode(text, RECORD, _DamagedError), RECORD, _DamagedError, most_values=MAX_VALUES
    )
    typed = parse_as(content, _RecordContent, RECORD, _DamagedError)
    if content.pop("digest") != _digest(content) or typed.key != step.key:
        raise ValueError(f"{RECORD} was changed")
    found = {str(p.relative_to(path)) for p in _files(path) if p.name != RECORD or p.parent != path}
    if missing := sorted(set(typed.files) ^ found):
        raise ValueError(f"{missing[0]} is missing or new")
    for name, expected in typed.files.items():
        if digest(path / name) != expected:
            raise ValueError(f"{name} was changed")
    result = parse_as(typed.found, step.result, RECORD, _DamagedError)
    return Record(result, typed.seconds, typed.origin)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
