"""From what the user names to a model that can be trained, with its tasks."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matsmerge.adapters.adapter import AdapterKind
from matsmerge.adapters.adapter_folder import ADAPTER_KINDS
from matsmerge.checkpoints.alignment import matches
from matsmerge.checkpoints.checkpoint import dtype_name
from matsmerge.errors import DataError, RecipeError, closest
from matsmerge.files.guarded_files import Content, read_json_as
from matsmerge.lab.training.fresh_heads import JointModel, load_classifier
from matsmerge.lab.training.new_adapters import put_earlier_adapter, put_new_adapter
from matsmerge.lab.training.run_folder import TRAINING_MANIFEST
from matsmerge.lab.training.trained_model import write_as_stored, write_joint, write_model
from matsmerge.lab.training.training_data import PreparedTask
from matsmerge.lab.training.training_options import (
    FULL,
    LEARNING_RATE,
    TrainingOptions,
)
from matsmerge.models.heads import EncoderWithHead
from matsmerge.models.model_folder import ModelFolder, open_model
from matsmerge.models.pretrained import choose_dtype, load_pretrained
from matsmerge.tasks.kinds import TASKS, TaskKind, choose_kind, kind_of_model
from matsmerge.tasks.loaded_model import load_model, make_task
from matsmerge.tasks.task import Task
from matsmerge.tasks.task_file import TaskFile


@dataclass(frozen=True)
class Start:
    """A model to be trained; each task has the model with its own head."""

    model: nn.Module
    models: Sequence[nn.Module]
    tasks: Sequence[Task[Any]]
    write: Callable[[Path], None]  # saves it in a folder, but for tokenizer and processor
    notes: list[str]


@dataclass(frozen=True)
class StartingModel:
    """A model that the user names, and how it is to be trained."""

    origin: ModelFolder
    options: TrainingOptions
    kind: AdapterKind | None  # None: all of the model is trained

    @classmethod
    def open(cls, source: str | Path, options: TrainingOptions) -> "StartingModel":
        origin = open_model(source)
        return cls(origin, options, _adapter_kind(origin, options))

    @property
    def rate(self) -> float:
        """The learning rate."""
        usual = LEARNING_RATE if self.kind is None else self.kind.learning_rate
        return usual if self.options.learning_rate is None else self.options.learning_rate

    def kind_of_task(self, task_file: TaskFile) -> TaskKind:
        """The kind of a task: as its file says, or else as the model was made for."""
        origin, kind = self.origin, task_file.kind
        config = origin.read_config()
        if kind is not None and kind.has_classes and task_file.head is None:
            kind.model_class(origin.base.label, config)
            return kind  # its head is fresh, whatever the model was made for
        inferred = kind_of_model(config, origin.adapter)
        if task_file.task is None and inferred is None:
            raise DataError(
                f"{task_file.name}: {origin.label} does not say what task it is for; add a "
                f"line task: KIND to the task file, one of {', '.join(TASKS)}"
            )
        return choose_kind(origin.label, kind, inferred, config)

    def load(self, tasks: Sequence[PreparedTask]) -> Start:
        """Load the model with heads and adapter; all random values depend on the seed alone."""
        if not tasks[0].kind.has_classes:
            start = self._text(tasks)
        elif any(map(_has_given_head, tasks)):
            start = self._with_given_heads(tasks)
        else:
            start = self._classifiers(tasks)
        _freeze(start.model, self.options.freeze)
        return start

    def _text(self, tasks: Sequence[PreparedTask]) -> Start:
        base, config = self.origin.base, self.origin.read_config()
        auto_class = tasks[0].kind.model_class(base.label, config)
        model, notes = load_pretrained(auto_class, base, config, self._dtype, None)
        doing = [self._make_task(task, model) for task in tasks]
        adapted = self._adapt(model, tasks[0], set())
        write = partial(write_model, adapted, self.origin)
        return Start(adapted, [adapted] * len(tasks), doing, write, notes)

    def _with_given_heads(self, tasks: Sequence[PreparedTask]) -> Start:
        """Heads from files, or made of text."""
        if self.kind is not None:
            raise DataError(
                f"{tasks[0].name}: a head in a file of its own (head:) or made of text goes with a "
                "full model, not with an adapter; leave it out for a fresh head"
            )
        if lacking := [task.name for task in tasks if not _has_given_head(task)]:
            raise DataError(
                f"{', '.join(lacking)}: has a fresh head, others a given one (head:, or a template "
                "of class names); tasks that are trained together have heads of one kind"
            )
        each = [
            load_model(
                self.origin.source,
                task.file.model_copy(update={"task": task.kind.kind}),
                dtype=dtype_name(self._dtype),
                device="cpu",
            )
            for task in tasks
        ]
        models = [loaded.model for loaded in each]
        model, doing = models[0], [loaded.task for loaded in each]
        notes = list(dict.fromkeys(note for loaded in each for note in loaded.notes))
        encoders = {type(m.encoder) if isinstance(m, EncoderWithHead) else None for m in models}
        if len(models) > 1:
            if None in encoders or len(encoders) > 1:
                raise DataError(
                    "heads of tasks that are trained together are each one linear layer on the "
                    "same output of the encoder; leave them out (head:) for fresh heads"
                )
            model = JointModel(models, {"head.weight", "head.bias"})
        write = partial(write_as_stored, each, [task.name for task in tasks])
        if None in encoders:
            write = partial(write_model, model, self.origin)
        return Start(model, models, doing, write, notes)

    def _classifiers(self, tasks: Sequence[PreparedTask]) -> Start:
        is_joint = len(tasks) > 1
        if is_joint and self.kind is not None:
            raise DataError(
                "several tasks with a head each are trained with --adapter full; an adapter keeps "
                "one head only"
            )
        if is_joint or self.kind is not None:
            _check_names(tasks, "several heads" if self.kind is None else self.kind.name)
        models, doing, notes = [], [], []
        head: set[str] = set()
        for i, task in enumerate(tasks):
            model, head, found = load_classifier(
                self.origin,
                task.kind,
                task.classes or [],
                self._dtype,
                seed=self.options.seed + i,
                fresh=self.options.fresh_head or is_joint,
            )
            notes += [note for note in found if note not in notes]
            doing.append(self._make_task(task, model))
            models.append(model)
        if is_joint:
            joint = JointModel(models, head)
            names = [task.name for task in tasks]
            write = partial(write_joint, joint, names, head, self.origin)
            return Start(joint, models, doing, write, notes)
        adapted = self._adapt(models[0], tasks[0], head)
        return Start(adapted, [adapted], doing, partial(write_model, adapted, self.origin), notes)

    def _make_task(self, task: PreparedTask, model: nn.Module) -> Task[Any]:
        return make_task(task.kind, model, self.origin, task.file.tokenizer, task.file.options())

    def _adapt(self, model: nn.Module, task: PreparedTask, head: set[str]) -> nn.Module:
        if self.origin.adapter is not None:
            keeps_head = not self.options.fresh_head and self._has_classes(task.classes)
            return put_earlier_adapter(model, self.origin.adapter, set() if keeps_head else head)
        if self.kind is None:
            return model
        torch.manual_seed(self.options.seed)
        task_type = task.kind.model_kind(model.config).peft_type
        return put_new_adapter(model, self.kind, task_type, self.options, head, self.origin.source)

    def _has_classes(self, names: list[str] | None) -> bool:
        """Is the head that an adapter brings for these classes?"""
        try:
            content = read_json_as(self.origin.folders[0] / TRAINING_MANIFEST, _Trained, DataError)
        except DataError:
            return False
        return bool(content.tasks) and content.tasks[0].labels == names

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype given or stored; without one given, full training has at least float32."""
        dtype = choose_dtype(self.options.dtype, self.origin.base)
        if self.options.dtype is None and self.kind is None:
            return torch.promote_types(dtype, torch.float32)
        return dtype


def _has_given_head(task: PreparedTask) -> bool:
    return task.file.head is not None or bool(task.file.options().class_prompts)


class _TrainedTask(Content):
    labels: list[str] | None = None


class _Trained(Content):
    """The parts of a training.json that a later run reads."""

    tasks: list[_TrainedTask]


def _adapter_kind(origin: ModelFolder, options: TrainingOptions) -> AdapterKind | None:
    """What is trained: a kind of adapter, or None for all of a model."""
    given = [f"--{n.replace('_', '-')}" for n, v in options.of_adapters.items() if v is not None]
    if origin.adapter is None:
        kind = ADAPTER_KINDS.get(options.adapter or FULL)
        if kind is None and given:
            raise RecipeError(f"{', '.join(given)}: of an adapter; say which with --adapter")
        return kind
    own = origin.adapter.kind
    if options.adapter not in (None, own.name):
        given = ["--adapter", *given]
    RecipeError.raise_all(
        f"{origin.source}: is an adapter ({own.name}) that is trained on as it is, which leaves "
        f"{name} no say; leave it out, or give a full model"
        for name in given
    )
    return own


def _check_names(tasks: Sequence[PreparedTask], what: str) -> None:
    """Refuse names of classes where only a full model would have room for them."""
    DataError.raise_all(
        f"{task.name}: its labels are names, which {what} cannot keep; add labels: "
        f"{json.dumps(task.classes)} to the task file"
        for task in tasks
        if task.has_unlisted_names
    )


def _freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    trained = [(_plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    names = [name for name, _ in trained]
    problems = [
        f"--freeze '{pattern}': matches no parameter that would be trained{closest(pattern, names)}"
        for pattern in patterns
        if not any(matches(name, [pattern]) for name in names)
    ]
    frozen = [parameter for name, parameter in trained if matches(name, patterns)]
    if trained and len(frozen) == len(trained) and not problems:
        problems.append("--freeze: matches every parameter, and nothing is left to train")
    RecipeError.raise_all(problems)
    for parameter in frozen:
        parameter.requires_grad_(False)


def _plain_name(name: str) -> str:
    """A parameter's name without the prefixes of PEFT and `JointModel`."""
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".")
    return re.sub(r"^models\.\d+\.", "", name)
