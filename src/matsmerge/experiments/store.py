"""What steps have made: a folder each, complete or not there, and checked before it is used."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from matsmerge.engine.merge_file import MAX_BYTES, MAX_VALUES
from matsmerge.errors import DataError, MatsError
from matsmerge.experiments.provenance import origin
from matsmerge.experiments.step import Given, Step, digest
from matsmerge.guarded_files import Content, decode, parse_as, parse_json, read_bytes
from matsmerge.whole_folder import sync

RECORD = "step.json"


@dataclass(frozen=True)
class Record:
    """What a step found, and how long it took."""

    found: Mapping[str, Any]
    seconds: float
    origin: Mapping[str, Any]  # versions, commit and machine it was done with


class Store:
    """The folder `steps` of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []  # what was damaged
        self._known: dict[str, Record] = {}

    def path(self, step: "Step | Given") -> Path:
        """Where a step's output is, or will be; the same step may have been named otherwise."""
        if isinstance(step, Given):
            return step.path
        there = sorted(self.folder.glob(f"*-{step.key[:12]}"))
        return there[0] if there else self.folder / step.folder_name

    def partial(self, step: Step) -> Path:
        """Where a step writes; what an interrupted one left is there."""
        return self.folder / f".{step.folder_name}.partial"

    def load(self, step: Step) -> Record | None:
        """What a step found; None if it is not done. What is damaged is thrown away."""
        if step.key not in self._known:
            path = self.path(step)
            if not path.exists():
                return None
            try:
                self._known[step.key] = _read(path, step)
            except (FileNotFoundError, NotADirectoryError, ValueError, _DamagedError) as error:
                self.notes.append(f"{step.name}: its output was damaged ({error}); done again")
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                return None
        return self._known[step.key]

    def put(self, step: Step, found: Mapping[str, Any], seconds: float) -> None:
        """Let a step's output appear under its name."""
        partial = self.partial(step)
        content: dict[str, Any] = {
            "name": step.name,
            "kind": step.kind,
            "key": step.key,
            "settings": step.settings,
            "seconds": round(seconds, 2),
            "found": found,
            "origin": origin(),
            "files": {str(p.relative_to(partial)): digest(p) for p in _files(partial)},
        }
        content["digest"] = _digest(content)
        record = partial / RECORD
        record.write_text(json.dumps(content, indent=1))
        sync(record)
        target = self.path(step)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        sync(self.folder)
        self._known[step.key] = _record(content)


class _RecordContent(Content):
    key: str
    digest: str
    found: dict[str, Any]
    seconds: float = Field(ge=0)
    origin: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, str]


class _DamagedError(MatsError):
    """A step's record is not what was written."""


def _read(path: Path, step: Step) -> Record:
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
    return _record(content)


def _record(content: Mapping[str, Any]) -> Record:
    return Record(content["found"], content["seconds"], content.get("origin", {}))


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
