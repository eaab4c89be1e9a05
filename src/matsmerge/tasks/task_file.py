"""A task in a file: what data, which columns, what they mean."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from matsmerge.checkpoints.source import local_path
from matsmerge.data.template import Wording, Wordings
from matsmerge.errors import DataError, closest
from matsmerge.files.guarded_files import reading
from matsmerge.files.mirror import fetch_path
from matsmerge.files.strict_yaml import read_yaml
from matsmerge.limits import MOST_AT_ONCE, NUM_SEEDS
from matsmerge.problems import problems_of
from matsmerge.tasks.kinds import TASKS, TaskKind
from matsmerge.tasks.task import TaskOptions, Turns

M = TypeVar("M", bound=BaseModel)


class TaskFile(BaseModel):
    """A task: its data and what they mean; what is not given is taken from model and data.

    Data is one source, or one for each split. Of one source, `splits` says the name of each split
    in it or a part of one, as `train[1000:]`, or how much of it each split gets, as a share or a
    number of rows; rows that are cut are put in a random order that depends on `seed` alone.
    `fields` are columns made of what others hold. In multiple choice, `labels` are what the data
    calls the choices, from the first on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str | None = Field(default=None, pattern=r"^[\w.-]+$")  # by default the file's
    task: str | None = None  # a name in TASKS
    data: str | dict[str, str] | None = None  # relative paths are relative to the file's folder
    split: str | None = None
    splits: dict[str, str] | dict[str, float | int] | None = None
    seed: int = Field(default=0, ge=0, lt=NUM_SEEDS)
    fields: dict[str, str] = Field(default_factory=dict)  # new column -> where, as choices.text.0
    columns: dict[str, str] = Field(default_factory=dict)  # the task's name -> the data's
    labels: list[str] | None = None  # names of the classes, in the order of their numbers
    max_length: int | None = Field(default=None, ge=1, le=MOST_AT_ONCE)
    head: str | None = None
    tokenizer: str | None = None
    length_normalize: bool = False
    turns: Turns = "assistant"  # whose tokens of a conversation are predicted
    packing: bool = False  # several texts of a language model in one sequence
    template: str | Wording | list[str | Wording] | None = None
    choices: list[str] | None = Field(default=None, min_length=2)  # of templates without any
    metrics: list[str] | None = Field(default=None, min_length=1)  # the first is what is tuned for
    generate: int | None = Field(default=None, ge=1, le=MOST_AT_ONCE)  # tokens of an answer

    @field_validator("task")
    @classmethod
    def _known(cls, task: str | None) -> str | None:
        if task is not None and task not in TASKS:
            raise ValueError(f"there is no task '{task}'{closest(task, TASKS)}")
        return task

    @model_validator(mode="after")
    def _with_valid_templates(self) -> Self:
        try:
            self.wordings  # noqa: B018  says what is wrong with them
        except DataError as error:
            raise ValueError(str(error)) from error
        return self

    def options(self, *, need_targets: bool = True) -> TaskOptions:
        """The options that concern how rows are encoded."""
        prompts = tuple(w.text for w in self._wordings) if self._is_about_classes else ()
        return TaskOptions(
            self.max_length,
            self.labels,
            self.length_normalize,
            need_targets,
            prompts,
            self.turns,
            self.packing,
        )

    @property
    def title(self) -> str:
        """What it is called in results and messages."""
        return self.name or "task"

    @property
    def kind(self) -> TaskKind | None:
        """The kind that it names."""
        return None if self.task is None else TASKS[self.task]

    @property
    def _is_about_classes(self) -> bool:
        return self.kind is not None and self.kind.templates_name_classes

    @property
    def _wordings(self) -> list[Wording]:
        if self.template is None:
            return []
        given = self.template if isinstance(self.template, list) else [self.template]
        return [Wording(text=w) if isinstance(w, str) else w for w in given]

    @property
    def wordings(self) -> Wordings | None:
        """How examples are put into words, if not by their columns alone.

        Of images, templates are about classes: the head is made of them.
        """
        wordings = self._wordings
        if not wordings or self._is_about_classes:
            return None
        with_choices = [
            w if w.choices is not None else w.model_copy(update={"choices": self.choices})
            for w in wordings
        ]
        return Wordings(with_choices, self.seed)


def read_task_file(path: str | Path) -> TaskFile:
    """Read a YAML or JSON file; everything that is wrong with it is one error."""
    path = local_path(path)
    with reading(path, DataError):
        is_there = fetch_path(path).exists()
    if not is_there:
        raise DataError(
            f"{path}: no such file; a task file says what kind of task it is and where its data "
            "is, in two lines: 'task: sequence_classification' and 'data: rows.jsonl'"
        )
    content = read_yaml(path, DataError)
    if not isinstance(content, Mapping):
        raise DataError(f"{path}: expected a mapping with keys such as 'task' and 'data'")
    try:
        file = TaskFile.model_validate(content)
    except ValidationError as error:
        raise DataError([f"{path}: {p}" for p in problems_of(error, TaskFile)]) from error
    if file.choices is not None and file.template is None:
        raise DataError(f"{path}: choices go with a template; without one they are a column")
    named = file.model_copy(update={"name": file.name or path.stem})
    return beside(path, named, "data", "head", "tokenizer")


def beside(path: Path, part: M, *names: str) -> M:
    """A part of a file, with paths in the fields of these names relative to the file's folder.

    A name that is no path there stays as it is: it is of something on a hub.
    """

    def place(source: Any) -> Any:
        if isinstance(source, Mapping):
            return {key: place(value) for key, value in source.items()}
        if not isinstance(source, str):
            return source
        with reading(path, DataError):
            other = fetch_path(path.parent / Path(source).expanduser(), whole=True)
        return str(other) if other.exists() else source

    found = {name: getattr(part, name) for name in names}
    places = {name: place(value) for name, value in found.items() if value is not None}
    return part.model_copy(update=places)
