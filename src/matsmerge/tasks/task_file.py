"""A task in a file: what data, which columns, what they mean."""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from matsmerge.errors import DataError, closest
from matsmerge.strict_yaml import read_yaml
from matsmerge.tasks.kinds import TASKS
from matsmerge.tasks.task import TaskOptions


class TaskFile(BaseModel):
    """What is not given is as the model and the data say."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    task: str | None = None  # a name in TASKS
    data: str | None = None  # relative paths are relative to the file's folder
    split: str | None = None
    columns: dict[str, str] = Field(default_factory=dict)  # the task's name -> the data's
    labels: list[str] | None = None  # names of the classes, in the order of their numbers
    max_length: int | None = Field(default=None, ge=1)
    head: str | None = None
    tokenizer: str | None = None
    length_normalize: bool = False
    template: str | None = None

    def options(self, *, need_targets: bool = True) -> TaskOptions:
        """What of it concerns encoding."""
        return TaskOptions(self.max_length, self.labels, self.length_normalize, need_targets)


def read_task_file(path: str | Path) -> TaskFile:
    """Read a YAML or JSON file; everything that is wrong with it is one error."""
    path = Path(path)
    content = read_yaml(path, DataError)
    if not isinstance(content, Mapping):
        raise DataError(f"{path}: expected a mapping with keys such as 'task' and 'data'")
    try:
        task_file = TaskFile.model_validate(content)
    except ValidationError as error:
        raise DataError([f"{path}: {problem}" for problem in _describe(error)]) from error
    if task_file.task is not None and task_file.task not in TASKS:
        raise DataError(
            f"{path}: there is no task '{task_file.task}'{closest(task_file.task, TASKS)}"
        )
    beside = {
        key: _beside(path, value)
        for key in ("data", "head", "tokenizer")
        if (value := getattr(task_file, key)) is not None
    }
    return task_file.model_copy(update=beside)


def parse_columns(text: str) -> dict[str, str]:
    """`{"text": "sentence", "label": "gold"}` from `"text=sentence,label=gold"`."""
    columns: dict[str, str] = {}
    for part in text.split(","):
        name, equals, source = (piece.strip() for piece in part.partition("="))
        if not (name and equals and source):
            raise DataError(
                f"--columns '{text}': expected names as in text=sentence,label=gold, "
                f"found '{part.strip()}'"
            )
        if name in columns:
            raise DataError(f"--columns '{text}': '{name}' is given twice")
        columns[name] = source
    return columns


def _beside(path: Path, name: str) -> str:
    """A path relative to a file's folder, if there is one; else the name, of something on a hub."""
    other = path.parent / Path(name).expanduser()
    return str(other) if other.exists() else name


def _describe(error: ValidationError) -> list[str]:
    problems = []
    for item in error.errors():
        where = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            problems.append(f"unknown key '{where}'{closest(where, TaskFile.model_fields)}")
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            problems.append(f"{where}: {message}, found {json.dumps(item['input'], default=str)}")
    return problems
