"""From what the user names to a model that can be trained, with its tasks."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matsmerge.adapters.adapter import Adapter, read_adapter
from matsmerge.adapters.base import open_base
from matsmerge.checkpoints.alignment import matches
from matsmerge.checkpoints.checkpoint import Checkpoint, dtype_name
from matsmerge.checkpoints.companions import companion_files
from matsmerge.checkpoints.opening import local_path, open_checkpoint
from matsmerge.errors import DataError, RecipeError, closest
from matsmerge.guarded_files import Content, read_json_as
from matsmerge.tasks.architectures import choose_kind, kind_of_adapter, kind_of_model, model_class
from matsmerge.tasks.heads import EncoderWithHead
from matsmerge.tasks.kinds import TASKS
from matsmerge.tasks.model_loading import load_model
from matsmerge.tasks.pretrained import choose_dtype, load_pretrained, quiet, read_config
from matsmerge.tasks.task import Task, has_any
from matsmerge.tasks.task_file import TaskFile
from matsmerge.training import saving
from matsmerge.training.classes import are_numbers
from matsmerge.training.fresh_heads import load_classifier
from matsmerge.training.joint_model import JointModel
from matsmerge.training.new_adapters import put_earlier_adapter, put_new_adapter
from matsmerge.training.options import AdapterKind, TrainingOptions
from matsmerge.training.run_folder import MANIFEST

CLASS_KINDS = ("sequence_classification", "token_classification", "image_classification")

Writer = Callable[[Path], None]


@dataclass(frozen=True)
class Origin:
    """What training starts from, not yet loaded."""

    source: str  # as the user named it
    checkpoint: Checkpoint
    adapter: Adapter | None  # if it is one
    base: Checkpoint  # of the adapter; else the checkpoint itself

    @property
    def folders(self) -> list[Path]:
        """Where a tokenizer may be."""
        found = [self.checkpoint.folder, self.base.folder]
        return list(dict.fromkeys(folder for folder in found if folder is not None))

    def adapter_kind(self, options: TrainingOptions) -> AdapterKind:
        """What is trained."""
        of_adapters = {
            "--target-modules": options.target_modules,
            "--feedforward-modules": options.feedforward_modules,
            "--rank": options.rank,
            "--alpha": options.alpha,
        }
        given = [name for name, value in of_adapters.items() if value is not None]
        if self.adapter is None:
            kind = options.adapter or "full"
            if kind == "full" and given:
                raise RecipeError(f"{', '.join(given)}: of an adapter; say which with --adapter")
            return kind
        own: AdapterKind = "lora" if self.adapter.config.kind == "lora" else "ia3"
        if options.adapter not in (None, own):
            given = ["--adapter", *given]
        problems = [
            f"{self.source}: is an adapter ({own}) that is trained on as it is, which leaves "
            f"{name} no say; leave it out, or give a full model"
            for name in given
        ]
        if problems:
            raise RecipeError(problems)
        return own


@dataclass(frozen=True)
class Start:
    """A model to be trained; each task has the model with its own head."""

    model: nn.Module
    models: Sequence[nn.Module]
    tasks: Sequence[Task[Any]]
    write: Writer  # saves it in a folder, but for tokenizer and processor
    notes: list[str] = field(default_factory=list)


def open_origin(source: str | Path) -> Origin:
    """Open a model's folder or a PEFT adapter's."""
    checkpoint = open_checkpoint(source)
    if checkpoint.folder is None:
        raise DataError(f"{source}: expected a model's folder with its config.json, found a file")
    companion_files(checkpoint.folder)  # refuses links out of the folder
    adapter = read_adapter(checkpoint)
    base = checkpoint if adapter is None else open_base(adapter)
    return Origin(str(source), checkpoint, adapter, base)


def kind_of_task(origin: Origin, task_file: TaskFile) -> str:
    """The kind that a task's file says, or the model."""
    assert origin.base.folder is not None
    config = read_config(origin.base.folder)
    inferred = kind_of_model(config)
    if origin.adapter is not None:
        inferred = kind_of_adapter(origin.adapter.config.task_type) or inferred
    if task_file.task is not None and task_file.task not in TASKS:
        raise DataError(
            f"{task_file.name}: there is no task '{task_file.task}'{closest(task_file.task, TASKS)}"
        )
    if task_file.task in CLASS_KINDS and task_file.head is None:
        model_class(origin.base.label, task_file.task, config)
        return task_file.task  # its head is fresh, whatever the model was made for
    if task_file.task is None and inferred is None:
        raise DataError(
            f"{task_file.name}: {origin.checkpoint.label} does not say what task it is for; add a "
            f"line task: KIND to the task file, one of {', '.join(TASKS)}"
        )
    return choose_kind(origin.checkpoint.label, task_file.task, inferred, config)


def load_start(
    origin: Origin,
    task_files: Sequence[TaskFile],
    kinds: Sequence[str],
    classes: Sequence[list[str] | None],
    options: TrainingOptions,
) -> Start:
    """Load the model with heads and adapter; all random values depend on the seed alone."""
    if kinds[0] not in CLASS_KINDS:
        start = _text(origin, task_files, kinds, options)
    elif any(f.head is not None or f.options().class_prompts for f in task_files):
        start = _with_stored_head(origin, task_files, kinds, options)
    else:
        names = [list(c) for c in classes if c is not None]
        start = _classifiers(origin, task_files, kinds, names, options)
    _freeze(start.model, options.freeze)
    return start


def _text(
    origin: Origin, task_files: Sequence[TaskFile], kinds: Sequence[str], options: TrainingOptions
) -> Start:
    base = origin.base
    assert base.folder is not None
    config = read_config(base.folder)
    use_cache = getattr(config, "use_cache", None)
    auto_class = model_class(base.label, kinds[0], config)
    model, notes = load_pretrained(auto_class, base, config, _dtype(origin, options), None)
    tasks = [
        _make_task(kind, model, origin, task_file)
        for kind, task_file in zip(kinds, task_files, strict=True)
    ]
    adapted = _adapt(model, origin, kinds[0], options, set(), keep_head=True)
    writer = saving.writer(adapted, use_cache)
    return Start(adapted, [adapted] * len(tasks), tasks, writer, notes)


def _with_stored_head(
    origin: Origin, task_files: Sequence[TaskFile], kinds: Sequence[str], options: TrainingOptions
) -> Start:
    if len(task_files) > 1:
        raise DataError(
            "a head in a file of its own (head:) goes with one task; leave it out to train several "
            "with fresh heads"
        )
    if origin.adapter_kind(options) != "full" or origin.adapter is not None:
        raise DataError(
            f"{task_files[0].name}: a head in a file of its own (head:) goes with a full model, "
            "not with an adapter; leave it out for a fresh head"
        )
    task_file = task_files[0]
    loaded = load_model(
        origin.source,
        task=kinds[0],
        head=task_file.head,
        tokenizer=task_file.tokenizer,
        options=task_file.options(),
        dtype=dtype_name(_dtype(origin, options)),
        device="cpu",
    )
    model = loaded.model
    if isinstance(model, EncoderWithHead):
        name = str(task_file.name)
        writer = saving.writer_like(
            origin.checkpoint, model, loaded.names, {name: loaded.head_names}
        )
    else:
        assert origin.base.folder is not None
        writer = saving.writer(model, getattr(read_config(origin.base.folder), "use_cache", None))
    return Start(model, [model], [loaded.task], writer, loaded.notes)


def _classifiers(
    origin: Origin,
    task_files: Sequence[TaskFile],
    kinds: Sequence[str],
    classes: Sequence[list[str]],
    options: TrainingOptions,
) -> Start:
    base = origin.base
    assert base.folder is not None
    kind = origin.adapter_kind(options)
    is_joint = len(task_files) > 1
    if is_joint and kind != "full":
        raise DataError(
            "several tasks with a head each are trained with --adapter full; an adapter keeps one "
            "head only"
        )
    _check_names(task_files, classes, "several heads" if is_joint else kind)
    models, tasks, notes = [], [], []
    head: set[str] = set()
    use_cache = None
    for i, (task_file, names) in enumerate(zip(task_files, classes, strict=True)):
        config = read_config(base.folder)
        use_cache = getattr(config, "use_cache", None)
        if use_cache:
            config.use_cache = False
        model, head, found = load_classifier(
            base,
            config,
            kinds[i],
            names,
            _dtype(origin, options),
            seed=options.seed + i,
            fresh=options.fresh_head or is_joint,
        )
        notes += [note for note in found if note not in notes]
        tasks.append(_make_task(kinds[i], model, origin, task_file))
        models.append(model)
    if is_joint:
        joint = JointModel(models, head)
        named = [str(task_file.name) for task_file in task_files]
        writer = saving.joint_writer(joint, named, head, use_cache)
        return Start(joint, models, tasks, writer, notes)
    keep_head = not options.fresh_head and _has_classes(origin, classes[0])
    adapted = _adapt(models[0], origin, kinds[0], options, head, keep_head=keep_head)
    return Start(adapted, [adapted], tasks, saving.writer(adapted, use_cache), notes)


def _adapt(
    model: nn.Module,
    origin: Origin,
    task_kind: str,
    options: TrainingOptions,
    head: set[str],
    *,
    keep_head: bool,
) -> nn.Module:
    kind = origin.adapter_kind(options)
    if origin.adapter is not None:
        return put_earlier_adapter(model, origin.adapter, head, keep_head=keep_head)
    if kind == "full":
        return model
    torch.manual_seed(options.seed)
    return put_new_adapter(model, kind, task_kind, options, head, origin.source)


class _TrainedTask(Content):
    labels: list[str] | None = None


class _Trained(Content):
    """Of a training.json what a later run looks at."""

    tasks: list[_TrainedTask]


def _has_classes(origin: Origin, names: list[str]) -> bool:
    """Is the head that an adapter brings for these classes?"""
    if origin.adapter is None:
        return False
    try:
        content = read_json_as(origin.folders[0] / MANIFEST, _Trained, DataError)
    except DataError:
        return False
    return bool(content.tasks) and content.tasks[0].labels == names


def _check_names(task_files: Sequence[TaskFile], classes: Sequence[list[str]], what: str) -> None:
    """Only a full model has room for the names of its classes."""
    if what == "full":
        return
    problems = [
        f"{task_file.name}: its labels are names, which {what} cannot keep; add labels: "
        f"{json.dumps(names)} to the task file"
        for task_file, names in zip(task_files, classes, strict=True)
        if task_file.labels is None and not are_numbers(names)
    ]
    if problems:
        raise DataError(problems)


def _make_task(kind: str, model: nn.Module, origin: Origin, task_file: TaskFile) -> Task[Any]:
    if task_file.tokenizer is not None:
        folder = local_path(task_file.tokenizer)
        if not folder.is_dir():
            raise DataError(f"{folder}: expected a folder with a tokenizer, found no such folder")
    else:
        patterns = TASKS[kind].files
        folders = origin.folders
        folder = next((f for f in folders if has_any(f, patterns)), folders[-1])
    with quiet():
        return TASKS[kind].for_model(model, folder, task_file.options())


def _dtype(origin: Origin, options: TrainingOptions) -> torch.dtype:
    """As stored; but what AdamW changes in small steps has at least 32 bits, unless asked for."""
    dtype = choose_dtype(options.dtype, origin.base)
    if options.dtype is None and origin.adapter_kind(options) == "full":
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
