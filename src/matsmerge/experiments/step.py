"""A piece of a suite's work, known by what goes into it."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from matsmerge.version import __version__


@dataclass(frozen=True)
class Given:
    """A local file or folder that a step reads, known by its content."""

    path: Path
    key: str

    @classmethod
    def at(cls, path: Path) -> "Given":
        return cls(path.absolute(), digest(path))


@dataclass(frozen=True)
class Step:
    """What to do, with which settings, from what.

    Two steps with the same kind, settings and needs are the same step, whatever their names.
    """

    kind: str  # a name in ACTIONS
    name: str  # for people
    settings: Mapping[str, Any]  # plain data
    needs: Mapping[str, "Step | Given"] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        needs = {name: need.key for name, need in self.needs.items()}
        content = json.dumps([__version__, self.kind, self.settings, needs], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def folder_name(self) -> str:
        readable = re.sub(r"[^\w.-]+", "-", self.name)
        return f"{readable[:60]}-{self.key[:12]}"


def with_needs(steps: Iterable[Step]) -> Iterator[Step]:
    """Steps and all that they need, each once, needs first."""
    seen: set[str] = set()

    def visit(step: Step) -> Iterator[Step]:
        if step.key in seen:
            return
        seen.add(step.key)
        for need in step.needs.values():
            if isinstance(need, Step):
                yield from visit(need)
        yield step

    for step in steps:
        yield from visit(step)


def digest(path: Path) -> str:
    """SHA-256 of a file, or of all files in a folder with their names."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    whole = hashlib.sha256()
    for file_path in sorted(p for p in path.rglob("*") if p.is_file()):
        whole.update(f"{file_path.relative_to(path)}\0{digest(file_path)}\0".encode())
    return whole.hexdigest()
