"""What a head's file says of itself: the names of its classes, and the model it was on.

A merged model has the base's configuration, which knows neither. Both are kept in the metadata of
`heads/NAME.safetensors`.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from matsmerge.adapters.adapter import CONFIG as ADAPTER_CONFIG
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.safetensors_header import read_header
from matsmerge.errors import DataError
from matsmerge.files.guarded_files import Content, parse_as, parse_json, read_json_as
from matsmerge.models.pretrained import ConfigContent
from matsmerge.tasks.kinds import TASKS, TaskKind

HEADS = "heads"  # the folder of a merged model that they are in
_KEY = "head"
_MOST_VALUES = 1 << 20
_TRAINING = "training.json"  # what `mats train` notes beside an adapter


class HeadRecord(Content):
    """A head's classes, and what it was on."""

    architecture: str | None = None  # the class of transformers; of an adapter's head none
    task: str | None = None  # of an adapter's head the kind of task, a name in TASKS
    labels: list[str] | None = None  # names of the classes, in the order of their numbers
    problem_type: str | None = None  # as transformers has it

    @property
    def kind(self) -> TaskKind | None:
        """The kind of task that it is for."""
        if self.task is not None:
            return TASKS.get(self.task)
        name = self.architecture or ""
        kinds = (k for k in TASKS.values() if k.has_classes and name.endswith(k.architectures))
        return next(kinds, None)

    @property
    def metadata(self) -> dict[str, str]:
        """What the head's file has as metadata."""
        known = self.model_dump(exclude_none=True)
        return {"format": "pt"} | ({_KEY: json.dumps(known)} if known else {})


class _AdapterContent(Content):
    task_type: str | None = None


class _Task(Content):
    labels: list[str] | None = None


class _TrainingContent(Content):
    tasks: list[_Task]


def record_head(folder: Path | None, labels: Sequence[str] | None = None) -> HeadRecord:
    """What is known of the head of a model in a folder; `labels` are those of its task's data."""
    own, record = None, HeadRecord()
    if folder is not None and (folder / ADAPTER_CONFIG).is_file():
        task_type = read_json_as(folder / ADAPTER_CONFIG, _AdapterContent, DataError).task_type
        of_type = (
            kind.kind for kind in TASKS.values() if task_type and kind.peft_type == task_type
        )
        record = HeadRecord(task=next(of_type, None))
        with suppress(DataError):  # another program may have written a file of this name
            tasks = read_json_as(folder / _TRAINING, _TrainingContent, DataError).tasks
            own = tasks[0].labels if len(tasks) == 1 else None
    elif folder is not None and (folder / "config.json").is_file():
        config = read_json_as(folder / "config.json", ConfigContent, DataError)
        architecture = next(iter(config.architectures or ()), None)
        record = HeadRecord(architecture=architecture, problem_type=config.problem_type)
        own = _names(config)
    found = own or (None if labels is None else list(labels))
    return record.model_copy(update={"labels": found})


def read_record(head: Checkpoint | None) -> HeadRecord:
    """What a head's file says; nothing of one that was written by others."""
    if head is None or head.place is None or head.place.suffix != ".safetensors":
        return HeadRecord()
    text = read_header(head.place).metadata.get(_KEY)
    if text is None:
        return HeadRecord()
    where = f"{head.label}: its metadata '{_KEY}'"
    content = parse_json(text, where, DataError, _MOST_VALUES)
    return parse_as(content, HeadRecord, where, DataError)


def find_heads(folder: Path | None) -> dict[str, Path]:
    """The heads in a model's folder, by the names of their tasks."""
    if folder is None or not (folder / HEADS).is_dir():
        return {}
    return {path.stem: path for path in sorted((folder / HEADS).glob("*.safetensors"))}


def _names(config: ConfigContent) -> list[str] | None:
    """The names of classes, unless they are those that transformers gives by itself."""
    listed = config.id2label or {}
    names = [str(listed.get(str(number))) for number in range(len(listed))]
    if not names or all(name == f"LABEL_{number}" for number, name in enumerate(names)):
        return None
    return names
