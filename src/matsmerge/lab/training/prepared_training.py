"""Everything that is read and checked before training begins."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.source import local_path
from matsmerge.errors import DataError
from matsmerge.lab.training.starting_model import Start, StartingModel
from matsmerge.lab.training.trainee import TaskExamples, Trainee
from matsmerge.lab.training.training_data import (
    PreparedTask,
    TrainingRows,
    prepare_task,
    read_files,
)
from matsmerge.lab.training.training_options import TrainingOptions
from matsmerge.problems import noted
from matsmerge.tasks.task import Encoded, Task, encode_all
from matsmerge.tasks.task_file import TaskFile
from matsmerge.version import __version__


@dataclass(frozen=True)
class PreparedTraining:
    """A run that can begin."""

    starting: StartingModel
    tasks: list[PreparedTask]
    start: Start
    trainee: Trainee
    described: dict[str, Any]  # model and tasks, for the manifest
    notes: list[str]

    @property
    def processor_folders(self) -> list[Path]:
        given = self.tasks[0].file.tokenizer
        own = [] if given is None else [local_path(given)]
        return [*own, *self.starting.origin.folders]

    @property
    def inputs(self) -> Mapping[str, Path]:
        """Folders and files that the output must not overlap with."""
        origin = self.starting.origin
        return {c.label: c.place for c in (origin.checkpoint, origin.base) if c.place is not None}

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be continued; the learning rate may change."""
        options = self.starting.options.described()
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


def prepare_training(
    source: str | Path, tasks: Sequence[str | Path | TaskFile], options: TrainingOptions
) -> PreparedTraining:
    """Read and check everything; what is wrong is said before anything is trained."""
    files = read_files(tasks)
    starting = StartingModel.open(source, options)
    problems: list[str] = []
    prepared = []
    for file in files:
        with noted(problems):
            prepared.append(prepare_task(file, starting.kind_of_task(file), options))
    DataError.raise_all(problems)
    _check_kinds(prepared)
    start = starting.load(prepared)
    examples, notes = [], list(start.notes)
    for one, task, model in zip(prepared, start.tasks, start.models, strict=True):
        with noted(problems):
            examples.append(_examples(one, task, model))
        notes += [f"{one.name}: {note}" for note in task.notes]
        if one.has_unlisted_names:
            notes.append(
                f"{one.name}: its classes are those found in the training data; a merge does not "
                f"keep their names, so add labels: {json.dumps(one.classes)} to the task file"
            )
    DataError.raise_all(problems)
    described = {
        "model": {"source": str(source), "fingerprint": fingerprint(starting.origin.checkpoint)},
        "tasks": [task.described() for task in prepared],
    }
    trainee = Trainee(start.model, examples)
    return PreparedTraining(starting, prepared, start, trainee, described, notes)


def _check_kinds(tasks: Sequence[PreparedTask]) -> None:
    kinds = {task.kind for task in tasks}
    if len(kinds) > 1 and any(kind.has_classes for kind in kinds):
        what = ", ".join(f"{task.name} ({task.kind.kind})" for task in tasks)
        raise DataError(f"these tasks cannot be trained in one model: {what}; train each alone")
    tokenizers = {task.file.tokenizer for task in tasks}
    if len(tokenizers) > 1:
        raise DataError("tasks that are trained together have one tokenizer; give all the same")


def _examples(prepared: PreparedTask, task: Task[Any], model: nn.Module) -> TaskExamples:
    file = prepared.file

    def encode(rows: TrainingRows) -> list[Encoded]:
        return encode_all(task, rows.data, file.columns, rows.numbers, wordings=file.wordings)

    validation = [] if prepared.validation is None else encode(prepared.validation)
    return TaskExamples(prepared.name, task, model, encode(prepared.train), validation)
