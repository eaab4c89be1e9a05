"""Steps: pieces of a suite's work, each known by what goes into it, so that it is done once."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, Union, get_args

from pydantic import BaseModel

from matsmerge.tasks.task_file import TaskFile
from matsmerge.version import __version__

R = TypeVar("R")


@dataclass(frozen=True)
class Given:
    """A local file or folder that a step reads, known by its content."""

    path: Path
    key: str

    @classmethod
    def at(cls, path: Path) -> "Given":
        return cls(path.absolute(), digest_tree(path))


Need = Union["Step[Any]", Given]
StepSource = Need | str  # a step's output, a local file, or a name on the hub


@dataclass(frozen=True)
class Places:
    """Where a step finds what it needs, by the needs' keys."""

    paths: Mapping[str, Path]

    def path(self, need: Need) -> Path:
        return self.paths[need.key]

    def name(self, source: StepSource) -> str:
        """A path, or a name on the hub, as loaders take them."""
        return source if isinstance(source, str) else str(self.path(source))


@dataclass(frozen=True, kw_only=True)
class Step(ABC, Generic[R]):
    """The settings of a piece of work as typed fields; steps and files it needs are fields, too.

    Two steps of one class with equal fields are the same step, whatever their names.
    """

    kind: ClassVar[str]
    result: ClassVar[Any]  # the type R, which pydantic can write as JSON and check
    output: ClassVar[str]  # the file or folder in the step's folder that other steps read
    runs_alone: ClassVar[bool]  # because it measures time

    name: str  # for people

    def __init_subclass__(cls, *, kind: str, output: str = "", runs_alone: bool = False) -> None:
        cls.kind, cls.output, cls.runs_alone = kind, output, runs_alone
        (cls.result,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]

    @abstractmethod
    def run(self, places: Places, out: Path, /) -> R:
        """Do the work in a folder, where an interrupted run may have left something."""

    @cached_property
    def _described(self) -> tuple[str, list[Need]]:
        """The fields but the name as JSON, in which needs are their keys; and the needs."""
        needs: list[Need] = []

        def plain(value: Any) -> Any:
            if isinstance(value, Step | Given):
                needs.append(value)
                return value.key
            return value.model_dump(mode="json") if isinstance(value, BaseModel) else vars(value)

        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        return json.dumps(own, sort_keys=True, default=plain), needs

    @property
    def settings(self) -> Any:
        """The fields as plain data."""
        return json.loads(self._described[0])

    @property
    def needs(self) -> list[Need]:
        return self._described[1]

    @cached_property
    def key(self) -> str:
        content = json.dumps([__version__, self.kind, self.settings], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def folder_name(self) -> str:
        readable = re.sub(r"[^\w.-]+", "-", self.name)
        return f"{readable[:60]}-{self.key[:12]}"


def with_needs(steps: Iterable[Step[Any]]) -> Iterator[Step[Any]]:
    """Steps and all that they need, each once, needs first."""
    seen: set[str] = set()

    def visit(step: Step[Any]) -> Iterator[Step[Any]]:
        if step.key in seen:
            return
        seen.add(step.key)
        for need in step.needs:
            if isinstance(need, Step):
                yield from visit(need)
        yield step

    for step in steps:
        yield from visit(step)


@dataclass(frozen=True)
class TaskInput:
    """A task of a step."""

    file: TaskFile
    data: Need | None = None  # instead of what the file names
    contents: Mapping[str, str] = field(default_factory=dict)  # digests of local files it names

    @property
    def name(self) -> str:
        return str(self.file.name)

    def read(self, places: Places) -> TaskFile:
        """The task file with the places of its data."""
        if self.data is None:
            return self.file
        return self.file.model_copy(update={"data": data_in(places.path(self.data))})


def data_in(path: Path) -> str | dict[str, str]:
    """Data as task files name it: one file, or the files of a folder by split."""
    if path.is_file():
        return str(path)
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name != "step.json")
    if len(files) == 1 and files[0].stem.split(".")[0] == "data":
        return str(files[0])
    return {file.name.split(".")[0]: str(file) for file in files}


def digest_tree(path: Path) -> str:
    """SHA-256 of a file, or of all files in a folder with their names."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    whole = hashlib.sha256()
    for file_path in sorted(p for p in path.rglob("*") if p.is_file()):
        whole.update(f"{file_path.relative_to(path)}\0{digest_tree(file_path)}\0".encode())
    return whole.hexdigest()
