"""Everything that is read and checked before training begins."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.opening import local_path
from matsmerge.checkpoints.public_names import public_name
from matsmerge.errors import DataError, MatsError, RecipeError
from matsmerge.tasks.data import Data, fingerprint_rows
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task import Encoded, Task, encode_all
from matsmerge.tasks.task_file import TaskFile, read_task_file
from matsmerge.training.classes import are_numbers, class_names
from matsmerge.training.options import AdapterKind, TrainingOptions
from matsmerge.training.starting import (
    CLASS_KINDS,
    Origin,
    Start,
    kind_of_task,
    load_start,
    open_origin,
)
from matsmerge.training.trainee import TaskExamples, Trainee
from matsmerge.training.validating import measure_of
from matsmerge.version import __version__

TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class Rows:
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
    kind: str
    classes: list[str] | None
    train: Rows
    validation: Rows | None

    @property
    def name(self) -> str:
        return str(self.file.name)

    def described(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "labels": self.classes,
            "train": self.train.described(),
            "validation": None if self.validation is None else self.validation.described(),
            "measure": measure_of(self.kind),
        }


@dataclass(frozen=True)
class PreparedTraining:
    """A run that can begin."""

    origin: Origin
    options: TrainingOptions
    kind: AdapterKind
    tasks: list[PreparedTask]
    start: Start
    trainee: Trainee
    described: dict[str, Any]  # model and tasks, for the manifest
    notes: list[str]

    @property
    def processor_folders(self) -> list[Path]:
        given = self.tasks[0].file.tokenizer
        own = [] if given is None else [local_path(given)]
        return [*own, *self.origin.folders]

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be continued; the learning rate may change."""
        options = self.options.described()
        del options["learning_rate"]
        files = [
            task.file.model_dump(mode="json", exclude={"data", "head", "tokenizer", "metrics"})
            for task in self.tasks
        ]
        return {
            "version": __version__,
            "model": self.described["model"]["fingerprint"],
            "tasks": self.described["tasks"],
            "task_files": files,
            **options,
        }


def prepare(
    source: str | Path, tasks: Sequence[str | Path | TaskFile], options: TrainingOptions
) -> PreparedTraining:
    """Read and check everything; what is wrong is said before anything is trained."""
    files = _read_files(tasks)
    origin = open_origin(source)
    kind = origin.adapter_kind(options)
    prepared, problems = [], []
    for file in files:
        try:
            prepared.append(_prepare_task(origin, file, options))
        except MatsError as error:
            problems += error.problems
    if problems:
        raise DataError(list(dict.fromkeys(problems)))
    _check_kinds(prepared)
    start = load_start(
        origin, files, [t.kind for t in prepared], [t.classes for t in prepared], options
    )
    examples = []
    for task, encoder, model in zip(prepared, start.tasks, start.models, strict=True):
        try:
            train = _encode(encoder, task.file, task.train)
            held = task.validation
            validation = [] if held is None else _encode(encoder, task.file, held)
        except MatsError as error:
            problems += error.problems
            continue
        examples.append(TaskExamples(task.name, encoder, model, train, validation))
    if problems:
        raise DataError(problems)
    described = {
        "model": {"source": str(source), "fingerprint": fingerprint(origin.checkpoint)},
        "tasks": [task.described() for task in prepared],
    }
    notes = [*start.notes, *_notes(prepared, start)]
    trainee = Trainee(start.model, examples)
    return PreparedTraining(origin, options, kind, prepared, start, trainee, described, notes)


def _read_files(tasks: Sequence[str | Path | TaskFile]) -> list[TaskFile]:
    if not tasks:
        raise RecipeError("say what to train on with --task FILE")
    files, problems = [], []
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
            try:
                files.append(read_task_file(path))
            except MatsError as error:
                problems += error.problems
    names = [str(file.name) for file in files]
    problems += [
        f"{names.count(name)} tasks have the name '{name}'; give each a name: of its own"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if problems:
        raise DataError(problems)
    return files


def _prepare_task(origin: Origin, file: TaskFile, options: TrainingOptions) -> PreparedTask:
    kind = kind_of_task(origin, file)
    train = _choose(_read(file, TRAIN), options.num_examples, options.seed)
    validation = None
    if options.validate_:
        validation = _choose(_read(file, VALIDATION), options.num_validation, options.seed)
    classes = None
    if kind in CLASS_KINDS and file.head is None:
        classes = class_names(file, kind, train.data)
    return PreparedTask(file, kind, classes, train, validation)


def _read(file: TaskFile, split: str) -> Data:
    """A split; of a task with one source and no splits there is none to validate on."""
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


def _choose(data: Data, most: int | None, seed: int) -> Rows:
    """At most so many rows, drawn at random."""
    if most is None or len(data) <= most:
        return Rows(data, list(range(len(data))))
    return Rows(data, sorted(random.Random(seed).sample(range(len(data)), most)))


def _check_kinds(tasks: Sequence[PreparedTask]) -> None:
    kinds = {task.kind for task in tasks}
    if len(kinds) > 1 and kinds & set(CLASS_KINDS):
        what = ", ".join(f"{task.name} ({task.kind})" for task in tasks)
        raise DataError(f"these tasks cannot be trained in one model: {what}; train each alone")
    tokenizers = {task.file.tokenizer for task in tasks}
    if len(tokenizers) > 1:
        raise DataError("tasks that are trained together have one tokenizer; give all the same")


def _encode(task: Task[Any], file: TaskFile, rows: Rows) -> list[Encoded]:
    encoded: list[Encoded] = encode_all(
        task, rows.data, file.columns, rows.numbers, wordings=file.wordings
    )
    return encoded


def _notes(tasks: Sequence[PreparedTask], start: Start) -> list[str]:
    notes: list[str] = []
    for task, encoder in zip(tasks, start.tasks, strict=True):
        notes += [f"{task.name}: {note}" for note in encoder.notes]
        names = task.classes
        if names is not None and task.file.labels is None and not are_numbers(names):
            notes.append(
                f"{task.name}: its classes are those found in the training data; a merge does not "
                f"keep their names, so add labels: {json.dumps(names)} to the task file"
            )
    return notes


def inputs_of(prepared: PreparedTraining) -> Mapping[str, Path]:
    """Folders and files that the output must not overlap with."""
    found = [prepared.origin.checkpoint, prepared.origin.base]
    return {c.label: c.place for c in found if c.place is not None}
