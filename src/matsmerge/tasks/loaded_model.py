"""From a folder or hub id to a model that is ready for its task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matsmerge.adapters.adapter import Adapter
from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec, first_line
from matsmerge.checkpoints.source import local_path, open_checkpoint
from matsmerge.errors import DataError
from matsmerge.models.heads import (
    head_parameters,
    is_plain_head,
    load_encoder_with_head,
    load_head,
    num_classes_of_head,
    rounding_notes,
)
from matsmerge.models.kept_base import KeptBase, unfold
from matsmerge.models.model_folder import ModelFolder, open_model
from matsmerge.models.parameter_names import match_names
from matsmerge.models.peft_model import (
    fold_into,
    match_adapter_names,
    peft_saved,
    put_adapter_on,
)
from matsmerge.models.pretrained import choose_dtype, load_pretrained, quiet, skeleton
from matsmerge.models.text_heads import make_text_head
from matsmerge.tasks.kinds import TaskKind, choose_kind, kind_of_encoder, kind_of_model
from matsmerge.tasks.task import Task, TaskOptions, has_any
from matsmerge.tasks.task_file import TaskFile


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its task, and where its parameters came from.

    `names` maps names in `model.named_parameters()` to tensors of `checkpoint` and `head_names` to
    tensors of the head's file; a parameter is in one of them or in neither. Of an (IA)^3 adapter,
    `checkpoint` is the adapter's, of a LoRA the full model it makes of its base; `base` is that
    of the model it is on.
    """

    model: nn.Module
    task: Task[Any]
    checkpoint: Checkpoint
    names: Mapping[str, str]
    head_names: Mapping[str, str] = field(default_factory=dict)
    base: Checkpoint | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Request:
    """What was asked for."""

    task: str | None
    head: Checkpoint | None
    tokenizer: str | Path | None
    options: TaskOptions
    dtype: str | None
    device_map: str | Mapping[str, Any] | None
    also: tuple[str, ...]
    kept: KeptBase


def load_model(
    source: str | Path,
    *,
    task: str | None = None,
    head: str | Path | None = None,
    tokenizer: str | Path | None = None,
    options: TaskOptions | None = None,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    also: Sequence[str] = (),
    kept: KeptBase | None = None,
) -> LoadedModel:
    """Load a model or a PEFT adapter on its base; code that comes with it is never run.

    The task is what the model's architecture says, unless given. `head` is a file with the head's
    parameters for a model stored without. The dtype is the one that holds what is stored, the
    device a GPU if there is one, unless given. Of an adapter, only what it changes takes
    gradients, and for LoRA parameters that match a pattern of `also`. With `kept` the base of
    one adapter is used again for the next, and the model of the first is gone then.
    """
    if device is not None and device_map is not None:
        raise DataError("give either a device or a device_map, not both")
    opened = open_model(source)
    request = _Request(
        task,
        None if head is None else open_checkpoint(head),
        tokenizer,
        options or TaskOptions(),
        dtype,
        device_map,
        tuple(also),
        kept or KeptBase(),
    )
    if opened.adapter is not None:
        loaded = _load_adapter(opened, opened.adapter, request)
    else:
        loaded = _load_full(opened, request)
        for parameter in loaded.model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
    loaded.model.eval()
    if device_map is None:
        _move(loaded.model, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return loaded


def load_for_task(
    source: str | Path, task_file: TaskFile, *, head: str | Path | None, **settings: Any
) -> LoadedModel:
    """Load a model as a task file says; the settings are those of `load_model`."""
    return load_model(
        source,
        task=task_file.task,
        head=head,
        tokenizer=task_file.tokenizer,
        options=task_file.options(),
        **settings,
    )


def _move(model: nn.Module, device: str) -> None:
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch raises either for what is not there
        raise DataError(
            f"device '{device}': the model cannot be put there ({first_line(error)})"
        ) from error


def _load_full(opened: ModelFolder, request: _Request) -> LoadedModel:
    checkpoint, config = opened.checkpoint, opened.read_config()
    head, prompts = request.head, request.options.class_prompts
    if head is None and prompts:
        dtype = choose_dtype(request.dtype, checkpoint)
        head = make_text_head(checkpoint, config, request.options.labels, prompts, dtype)
    if head is not None and is_plain_head(head):
        return _load_with_plain_head(opened, head, config, request)
    kind = choose_kind(opened.label, request.task, kind_of_model(config), config)
    auto_class = kind.model_class(opened.label, config)
    model, head_names, notes = _load_auto(auto_class, checkpoint, config, request, {})
    task = make_task(kind, model, opened, request.tokenizer, request.options)
    names = match_names(model, checkpoint)
    return _loaded(model, task, checkpoint, names, head_names, notes)


def _load_auto(
    auto_class: Any,
    checkpoint: Checkpoint,
    config: Any,
    request: _Request,
    of_adapter: Mapping[str, TensorSpec],
) -> tuple[nn.Module, dict[str, str], list[str]]:
    """A model of transformers, its head from a file or, later, from the adapter."""
    head = request.head
    given = dict(of_adapter) | (peft_saved(head.specs) if head is not None else {})
    supplied: set[str] = set()
    head_names: dict[str, str] = {}
    if given:
        with quiet():
            num_classes = num_classes_of_head(auto_class, config, given)
            if num_classes is not None and num_classes != config.num_labels:
                config.num_labels = num_classes
            empty = skeleton(auto_class, config)
        if head is not None:
            head_names = head_parameters(empty, head)
        supplied = set(head_names) | {n for n, _ in empty.named_parameters() if n in of_adapter}
    dtype = choose_dtype(request.dtype, checkpoint)
    # What must be the same for a base to be used again.
    key = (
        checkpoint.place,
        auto_class,
        config.num_labels,
        dtype,
        str(request.device_map),
        frozenset(supplied),
    )
    notes: list[str] = []
    model = request.kept.take(key)
    if model is None:
        model, notes = load_pretrained(
            auto_class,
            checkpoint,
            config,
            dtype,
            request.device_map,
            supplied=supplied,
            partly_used=bool(given),
        )
    request.kept.keep(key, model)
    if head is not None:
        load_head(model, head, head_names)
        notes = notes + rounding_notes(head, dtype)
        _forget_names(model)
    _forget_cache(model)
    return model, head_names, notes


def _forget_names(model: nn.Module) -> None:
    """Forget what classes are called: with a head from elsewhere, they are other classes."""
    config: Any = model.config
    config.id2label = {number: f"LABEL_{number}" for number in range(config.num_labels)}
    config.label2id = {name: number for number, name in config.id2label.items()}


def _load_with_plain_head(
    opened: ModelFolder, head: Checkpoint, config: Any, request: _Request
) -> LoadedModel:
    checkpoint = opened.checkpoint
    dtype = choose_dtype(request.dtype, checkpoint)
    model, notes = load_encoder_with_head(checkpoint, head, config, dtype, request.device_map)
    encoder: Any = model.encoder
    inferred = kind_of_encoder(encoder.main_input_name)
    kind = choose_kind(opened.label, request.task, inferred, config)
    task = make_task(kind, encoder, opened, request.tokenizer, request.options)
    names = {f"encoder.{n}": stored for n, stored in match_names(encoder, checkpoint).items()}
    if model.scale is not None:
        names["scale.logit_scale"] = "logit_scale"
    head_names = {f"head.{stored}": stored for stored in head.specs}
    return _loaded(model, task, checkpoint, names, head_names, notes)


def _load_adapter(opened: ModelFolder, adapter: Adapter, request: _Request) -> LoadedModel:
    checkpoint, base, config = opened.checkpoint, opened.base, opened.read_config()
    inferred = kind_of_model(config, adapter)
    kind = choose_kind(opened.label, request.task, inferred, config)
    auto_class = kind.model_class(base.label, config)
    model, head_names, notes = _load_auto(
        auto_class, base, config, request, peft_saved(checkpoint.specs)
    )
    task = make_task(kind, model, opened, request.tokenizer, request.options)
    if adapter.kind.is_folded:
        adapted, names = fold_into(model, adapter, base, request.also, set(head_names))
        request.kept.undo_with(partial(unfold, model, adapted, names))
        names = {name: stored for name, stored in names.items() if name not in head_names}
        return LoadedModel(model, task, adapted, names, head_names, base, notes)
    apart = {name: model.get_parameter(name).detach() for name in head_names}
    with_vectors: Any = put_adapter_on(model, checkpoint, apart)
    request.kept.undo_with(with_vectors.unload)
    names, of_head = match_adapter_names(with_vectors, checkpoint, head_names)
    return LoadedModel(with_vectors, task, checkpoint, names, of_head, base, notes)


def _loaded(
    model: nn.Module,
    task: Task[Any],
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    head_names: Mapping[str, str],
    notes: list[str],
) -> LoadedModel:
    own = {name: stored for name, stored in names.items() if name not in head_names}
    unknown = [n for n, _ in model.named_parameters() if n not in own and n not in head_names]
    if unknown:
        notes = [
            *notes,
            f"{checkpoint.label}: no tensor of its own was found for {len(unknown)} parameters, "
            f"such as '{unknown[0]}'",
        ]
    return LoadedModel(model, task, checkpoint, own, head_names, None, notes)


def make_task(
    kind: TaskKind,
    model: nn.Module,
    opened: ModelFolder,
    tokenizer: str | Path | None,
    options: TaskOptions,
) -> Task[Any]:
    """The task as a model does it; tokenizer or image processor are the model's, unless given."""
    if tokenizer is not None:
        folder = local_path(tokenizer)
        if not folder.is_dir():
            raise DataError(
                f"{tokenizer}: expected a folder with a tokenizer, found no such folder"
            )
    else:
        folders = opened.folders
        folder = next((f for f in folders if has_any(f, kind.files)), folders[-1])
    with quiet():
        return kind.for_model(model, folder, options)


def _forget_cache(model: nn.Module) -> None:
    """Keys and values are kept for generating text, which nothing here does."""
    config: Any = model.config
    if getattr(config, "use_cache", False):
        config.use_cache = False
