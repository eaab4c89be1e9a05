"""From what the user names to a model that can be trained, with its tasks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from matsmerge.adapters.adapter import AdapterKind
from matsmerge.adapters.adapter_folder import ADAPTER_KINDS
from matsmerge.checkpoints.alignment import matches
from matsmerge.checkpoints.checkpoint import dtype_name
from matsmerge.errors import DataError, RecipeError, closest
from matsmerge.files.guarded_files import Content, read_json_as
from matsmerge.lab.training import trained_model
from matsmerge.lab.training.fresh_heads import load_classifier
from matsmerge.lab.training.joint_model import JointModel
from matsmerge.lab.training.new_adapters import put_earlier_adapter, put_new_adapter
from matsmerge.lab.training.run_folder import MANIFEST
from matsmerge.lab.training.training_data import PreparedTask, are_numbers
from matsmerge.lab.training.training_options import FULL, TrainingOptions
from matsmerge.models.heads import EncoderWithHead
from matsmerge.models.model_folder import ModelFolder
from matsmerge.models.pretrained import choose_dtype, load_pretrained
from matsmerge.tasks.kinds import TASKS, TaskKind, choose_kind, kind_of_model
from matsmerge.tasks.loaded_model import load_for_task, make_task
from matsmerge.tasks.task import Task
from matsmerge.tasks.task_file import TaskFile


@dataclass(frozen=True)
class Start:
    """A model to be trained; each task has the model with its own head."""

    model: nn.Module
    models: Sequence[nn.Module]
    tasks: Sequence[Task[Any]]
    write: trained_model.Writer  # saves it in a folder, but for tokenizer and processor
    notes: list[str] = field(default_factory=list)


def adapter_kind(origin: ModelFolder, options: TrainingOptions) -> AdapterKind | None:
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
    problems = [
        f"{origin.source}: is an adapter ({own.name}) that is trained on as it is, which leaves "
        f"{name} no say; leave it out, or give a full model"
        for name in given
    ]
    if problems:
        raise RecipeError(problems)
    return own


def kind_of_task(origin: ModelFolder, task_file: TaskFile) -> TaskKind:
    """The kind that a task's file says, or the model."""
    config = origin.read_config()
    inferred = kind_of_model(config, origin.adapter)
    kind = task_file.kind
    if task_file.task is not None and kind is None:
        raise DataError(
            f"{task_file.name}: there is no task '{task_file.task}'{closest(task_file.task, TASKS)}"
        )
    if kind is not None and kind.has_classes and task_file.head is None:
        kind.model_class(origin.base.label, config)
        return kind  # its head is fresh, whatever the model was made for
    if kind is None and inferred is None:
        raise DataError(
            f"{task_file.name}: {origin.label} does not say what task it is for; add a "
            f"line task: KIND to the task file, one of {', '.join(TASKS)}"
        )
    return choose_kind(origin.label, task_file.task, inferred, config)


def load_start(
    origin: ModelFolder, tasks: Sequence[PreparedTask], options: TrainingOptions
) -> Start:
    """Load the model with heads and adapter; all random values depend on the seed alone."""
    if not tasks[0].kind.has_classes:
        start = _text(origin, tasks, options)
    elif any(t.file.head is not None or t.file.options().class_prompts for t in tasks):
        start = _with_stored_head(origin, tasks, options)
    else:
        start = _classifiers(origin, tasks, options)
    _freeze(start.model, options.freeze)
    return start


def _text(origin: ModelFolder, tasks: Sequence[PreparedTask], options: TrainingOptions) -> Start:
    config = origin.read_config()
    use_cache = getattr(config, "use_cache", None)
    auto_class = tasks[0].kind.model_class(origin.base.label, config)
    model, notes = load_pretrained(auto_class, origin.base, config, _dtype(origin, options), None)
    doing = [_make_task(task, model, origin) for task in tasks]
    adapted = _adapt(model, origin, tasks[0].kind, options, set(), keep_head=True)
    writer = trained_model.writer(adapted, use_cache)
    return Start(adapted, [adapted] * len(tasks), doing, writer, notes)


def _with_stored_head(
    origin: ModelFolder, tasks: Sequence[PreparedTask], options: TrainingOptions
) -> Start:
    if len(tasks) > 1:
        raise DataError(
            "a head in a file of its own (head:) goes with one task; leave it out to train several "
            "with fresh heads"
        )
    task = tasks[0]
    if adapter_kind(origin, options) is not None:
        raise DataError(
            f"{task.name}: a head in a file of its own (head:) goes with a full model, "
            "not with an adapter; leave it out for a fresh head"
        )
    dtype = dtype_name(_dtype(origin, options))
    named = task.file.model_copy(update={"task": task.kind.kind})
    loaded = load_for_task(origin.source, named, head=task.file.head, dtype=dtype, device="cpu")
    model = loaded.model
    if isinstance(model, EncoderWithHead):
        heads = {task.name: loaded.head_names}
        writer = trained_model.writer_like(origin.checkpoint, model, loaded.names, heads)
    else:
        writer = trained_model.writer(model, getattr(origin.read_config(), "use_cache", None))
    return Start(model, [model], [loaded.task], writer, loaded.notes)


def _classifiers(
    origin: ModelFolder, tasks: Sequence[PreparedTask], options: TrainingOptions
) -> Start:
    kind = adapter_kind(origin, options)
    is_joint = len(tasks) > 1
    if is_joint and kind is not None:
        raise DataError(
            "several tasks with a head each are trained with --adapter full; an adapter keeps one "
            "head only"
        )
    if is_joint or kind is not None:
        _check_names(tasks, "several heads" if kind is None else kind.name)
    models, doing, notes = [], [], []
    head: set[str] = set()
    use_cache = None
    for i, task in enumerate(tasks):
        config = origin.read_config()
        use_cache = getattr(config, "use_cache", None)
        if use_cache:
            config.use_cache = False
        model, head, found = load_classifier(
            origin.base,
            config,
            task.kind,
            list(task.classes or ()),
            _dtype(origin, options),
            seed=options.seed + i,
            fresh=options.fresh_head or is_joint,
        )
        notes += [note for note in found if note not in notes]
        doing.append(_make_task(task, model, origin))
        models.append(model)
    if is_joint:
        joint = JointModel(models, head)
        writer = trained_model.joint_writer(joint, [t.name for t in tasks], head, use_cache)
        return Start(joint, models, doing, writer, notes)
    keep_head = not options.fresh_head and _has_classes(origin, tasks[0].classes or [])
    adapted = _adapt(models[0], origin, tasks[0].kind, options, head, keep_head=keep_head)
    return Start(adapted, [adapted], doing, trained_model.writer(adapted, use_cache), notes)


def _make_task(task: PreparedTask, model: nn.Module, origin: ModelFolder) -> Task[Any]:
    return make_task(task.kind, model, origin, task.file.tokenizer, task.file.options())


def _adapt(
    model: nn.Module,
    origin: ModelFolder,
    task_kind: TaskKind,
    options: TrainingOptions,
    head: set[str],
    *,
    keep_head: bool,
) -> nn.Module:
    if origin.adapter is not None:
        return put_earlier_adapter(model, origin.adapter, head, keep_head=keep_head)
    kind = adapter_kind(origin, options)
    if kind is None:
        return model
    torch.manual_seed(options.seed)
    task_type = task_kind.model_kind(model.config).peft_type
    return put_new_adapter(model, kind, task_type, options, head, origin.source)


class _TrainedTask(Content):
    labels: list[str] | None = None


class _Trained(Content):
    """Of a training.json what a later run looks at."""

    tasks: list[_TrainedTask]


def _has_classes(origin: ModelFolder, names: list[str]) -> bool:
    """Is the head that an adapter brings for these classes?"""
    if origin.adapter is None:
        return False
    try:
        content = read_json_as(origin.folders[0] / MANIFEST, _Trained, DataError)
    except DataError:
        return False
    return bool(content.tasks) and content.tasks[0].labels == names


def _check_names(tasks: Sequence[PreparedTask], what: str) -> None:
    """Refuse names of classes where only a full model would have room for them."""
    problems = [
        f"{task.name}: its labels are names, which {what} cannot keep; add labels: "
        f"{json.dumps(task.classes)} to the task file"
        for task in tasks
        if task.file.labels is None and not are_numbers(task.classes or [])
    ]
    if problems:
        raise DataError(problems)


def _dtype(origin: ModelFolder, options: TrainingOptions) -> torch.dtype:
    """As stored; but what AdamW changes in small steps has at least 32 bits, unless asked for."""
    dtype = choose_dtype(options.dtype, origin.base)
    if options.dtype is None and adapter_kind(origin, options) is None:
        return torch.promote_types(dtype, torch.float32)
    return dtype


def _freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    plain = {name: _plain_name(name) for name in names}
    problems = [
        f"--freeze '{pattern}': matches no parameter that would be trained"
        f"{closest(pattern, plain.values())}"
        for pattern in patterns
        if not any(matches(plain[name], [pattern]) for name in names)
    ]
    frozen = [name for name in names if matches(plain[name], patterns)]
    if names and len(frozen) == len(names) and not problems:
        problems.append("--freeze: matches every parameter, and nothing is left to train")
    if problems:
        raise RecipeError(problems)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)


def _plain_name(name: str) -> str:
    """A parameter's name without what wraps its model."""
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".")
    first, _, rest = name.partition(".")
    if first == "models" and rest.partition(".")[0].isdecimal():
        return rest.partition(".")[2]
    return name
