"""What a run is trained on: the rows of each task, and its classes."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.public_names import public_name
from matsmerge.checkpoints.source import local_path
from matsmerge.data.row_problems import describe_value
from matsmerge.data.rows import Data, fingerprint_rows
from matsmerge.errors import DataError, RecipeError, closest
from matsmerge.lab.training.training_options import TrainingOptions
from matsmerge.problems import noted
from matsmerge.tasks.kinds import TaskKind
from matsmerge.tasks.prediction import IGNORED
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task_file import TaskFile, read_task_file

TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a split that are used."""

    data: Data
    numbers: list[int]

    def described(self) -> dict[str, Any]:
        rows = (self.data.rows[n] for n in self.numbers)
        return {
            "data": public_name(self.data.name),
            "num_examples": len(self.numbers),
            "fingerprint": fingerprint_rows(rows, self.data.folder),
        }


@dataclass(frozen=True)
class PreparedTask:
    """A task's file, its kind and classes, and the rows that are used."""

    file: TaskFile
    kind: TaskKind
    classes: list[str] | None
    train: TrainingRows
    validation: TrainingRows | None

    @property
    def name(self) -> str:
        return str(self.file.name)

    @property
    def has_unlisted_names(self) -> bool:
        """Are its classes named, and listed nowhere but in the training data?"""
        names = self.classes or []
        return self.file.labels is None and names != _numbers_up_to(len(names))

    def described(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind.kind,
            "labels": self.classes,
            "train": self.train.described(),
            "validation": None if self.validation is None else self.validation.described(),
            "measure": self.kind.measure,
        }


def read_files(tasks: Sequence[str | Path | TaskFile]) -> list[TaskFile]:
    """The task files, each with a name of its own."""
    if not tasks:
        raise RecipeError("say what to train on with --task FILE")
    files = []
    problems: list[str] = []
    for number, task in enumerate(tasks):
        if isinstance(task, TaskFile):
            name = task.name or f"task-{number + 1}"
            files.append(task.model_copy(update={"name": name}))
            continue
        path = local_path(task)
        if path.suffix not in (".yaml", ".yml", ".json"):
            problems.append(f"--task '{task}': expected a task file (.yaml)")
        elif not path.is_file():
            problems.append(f"--task '{task}': no such file")
        else:
            with noted(problems):
                files.append(read_task_file(path))
    names = [str(file.name) for file in files]
    problems += [
        f"{names.count(name)} tasks have the name '{name}'; give each a name: of its own"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    DataError.raise_all(problems)
    return files


def prepare_task(file: TaskFile, kind: TaskKind, options: TrainingOptions) -> PreparedTask:
    """Read a task's rows, and find its classes."""
    train = _choose(_read(file, TRAIN), options.num_examples, options.seed)
    validation = None
    if options.validate_:
        validation = _choose(_read(file, VALIDATION), options.num_validation, options.seed)
    classes = None
    if kind.has_classes and file.head is None:
        classes = class_names(file, kind, train.data)
    return PreparedTask(file, kind, classes, train, validation)


def _read(file: TaskFile, split: str) -> Data:
    """Read a split; a task with one file and no splits has only training data."""
    is_whole = isinstance(file.data, str) and file.splits is None
    if is_whole and local_path(str(file.data)).is_file():
        if split == TRAIN:
            return read_split(file.model_copy(update={"split": None}))
        raise DataError(f"{file.name}: its data has no split '{split}'; {_ADVICE}")
    try:
        return read_split(file, split)
    except DataError as error:
        if split == TRAIN:
            raise
        raise DataError([*error.problems, f"{file.name}: {_ADVICE}"]) from error


_ADVICE = (
    "scores on it say when to stop. Make one with splits: {train: 0.8, validation: 0.1, test: 0.1} "
    "in the task file, or name one with data: {train: FILE, validation: FILE}, or train without by "
    "--no-validation"
)


def _choose(data: Data, most: int | None, seed: int) -> TrainingRows:
    """At most so many rows, drawn at random."""
    if most is None or len(data) <= most:
        return TrainingRows(data, list(range(len(data))))
    return TrainingRows(data, sorted(random.Random(seed).sample(range(len(data)), most)))


def class_names(task_file: TaskFile, kind: TaskKind, data: Data) -> list[str]:
    """Names of the classes in the order of their numbers.

    Where the file lists none: the labels of the training data in order; numbers, from 0 on, are
    their own names.
    """
    name = task_file.name or "the task"
    if task_file.labels is not None:
        if len(set(task_file.labels)) != len(task_file.labels) or len(task_file.labels) < 2:
            raise DataError(
                f"{name}: labels: expected at least two different names, found "
                f"{', '.join(task_file.labels)}"
            )
        return list(task_file.labels)
    found = set(_labels(task_file, kind, data))
    if not found:
        raise DataError(f"{data.name}: has no labels at all")
    if all(isinstance(label, int) for label in found):
        return _numbered(data, {int(label) for label in found})
    if any(isinstance(label, int) for label in found):
        raise DataError(
            f"{data.name}: some labels are numbers and some are names; list the names as labels: "
            f"[...] in {name}, in the order of the numbers"
        )
    names = sorted(map(str, found), key=_numbers_in_order)
    if len(names) < 2:
        raise DataError(f"{data.name}: every label is '{names[0]}'; expected at least two classes")
    return names


def _labels(task_file: TaskFile, kind: TaskKind, data: Data) -> Iterator[int | str]:
    target = kind.targets
    assert target is not None
    column = task_file.columns.get(target, target)
    if column not in data.columns:
        raise DataError(
            f"{data.name}: has no column '{column}' for the task {kind.kind}; name it with "
            f"columns: {{{target}: ...}} in the task file{closest(column, data.columns)}"
        )
    for number, row in enumerate(data.rows):
        value: Any = row.get(column)
        for label in value if isinstance(value, (list, tuple)) else [value]:
            plain = label.item() if hasattr(label, "item") else label
            if not isinstance(plain, (int, str)):
                raise DataError(
                    f"{data.name}: row {number + 1}: '{column}': expected a label, a number or a "
                    f"name, found {describe_value(plain)}"
                )
            if plain != IGNORED:
                yield int(plain) if isinstance(plain, bool) else plain


def _numbered(data: Data, found: set[int]) -> list[str]:
    num_classes = max(found) + 1
    if min(found) < 0 or num_classes < 2 or 2 * len(found) < num_classes:
        some = ", ".join(map(str, sorted(found)[:10]))
        raise DataError(
            f"{data.name}: expected labels that count from 0 to the number of classes less one, or "
            f"names; found {some}"
        )
    return _numbers_up_to(num_classes)


def _numbers_up_to(num: int) -> list[str]:
    """`["0", "1", ...]`, the names of classes that are only numbered."""
    return [str(number) for number in range(num)]


def _numbers_in_order(name: str) -> tuple[bool, int, str]:
    """Numbers before names, 10 after 9."""
    is_number = name.isdecimal()
    return (not is_number, int(name) if is_number else 0, name)
