"""Everything that is read and checked before training begins."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matsmerge.adapters.adapter import AdapterKind
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.source import local_path
from matsmerge.errors import DataError, MatsError
from matsmerge.lab.training.starting_model import Start, adapter_kind, kind_of_task, load_start
from matsmerge.lab.training.trainee import TaskExamples, Trainee
from matsmerge.lab.training.training_data import (
    PreparedTask,
    Rows,
    are_numbers,
    prepare_task,
    read_files,
)
from matsmerge.lab.training.training_options import TrainingOptions
from matsmerge.models.model_folder import ModelFolder, open_model
from matsmerge.tasks.task import Encoded, Task, encode_all
from matsmerge.tasks.task_file import TaskFile
from matsmerge.version import __version__


@dataclass(frozen=True)
class PreparedTraining:
    """A run that can begin."""

    origin: ModelFolder
    options: TrainingOptions
    kind: AdapterKind | None  # None: all of the model is trained
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
    files = read_files(tasks)
    origin = open_model(source)
    kind = adapter_kind(origin, options)
    prepared, problems = [], []
    for file in files:
        try:
            prepared.append(prepare_task(file, kind_of_task(origin, file), options))
        except MatsError as error:
            problems += error.problems
    if problems:
        raise DataError(list(dict.fromkeys(problems)))
    _check_kinds(prepared)
    start = load_start(origin, prepared, options)
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


def _check_kinds(tasks: Sequence[PreparedTask]) -> None:
    kinds = {task.kind for task in tasks}
    if len(kinds) > 1 and any(kind.has_classes for kind in kinds):
        what = ", ".join(f"{task.name} ({task.kind.kind})" for task in tasks)
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
