"""From a folder or hub id to a model that is ready for its task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec, first_line
from matsmerge.checkpoints.source import local_path, open_checkpoint
from matsmerge.errors import DataError
from matsmerge.models.experts import keep_apart
from matsmerge.models.heads import (
    head_parameters,
    is_plain_head,
    load_encoder_with_head,
    make_text_head,
    num_classes_of_head,
    put_head,
)
from matsmerge.models.kept_base import KeptBase
from matsmerge.models.model_folder import ModelFolder, open_model
from matsmerge.models.parameter_names import match_names, unmatched_names
from matsmerge.models.peft_model import (
    fold_into,
    match_adapter_names,
    peft_saved,
    put_adapter_on,
    unfold,
)
from matsmerge.models.pretrained import choose_dtype, load_pretrained, quiet, skeleton
from matsmerge.models.streamed_model import EMPTY
from matsmerge.tasks.head_record import HeadRecord, read_record
from matsmerge.tasks.kinds import TaskKind, choose_kind, kind_of_encoder, kind_of_model
from matsmerge.tasks.task import Task, TaskOptions, has_any
from matsmerge.tasks.task_file import TaskFile


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its task, and where its parameters came from.

    `names` maps names in `model.named_parameters()`, of fused experts the parts' (`ExpertsApart`),
    to tensors of `checkpoint`, and `head_names` to tensors of the head's file; a parameter is in
    one of them or in neither. Of an (IA)^3 adapter, `checkpoint` is the adapter's, of a LoRA the
    full model it makes of its base; `base` is that of the model it is on.
    """

    model: nn.Module
    task: Task[Any]
    checkpoint: Checkpoint
    names: Mapping[str, str]
    head_names: Mapping[str, str] = field(default_factory=dict)
    base: Checkpoint | None = None
    head: Checkpoint | None = None  # the head's file
    notes: list[str] = field(default_factory=list)


def load_model(
    source: str | Path,
    file: TaskFile | None = None,
    *,
    head: str | Path | None = None,
    need_targets: bool = True,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    also: Sequence[str] = (),
    kept: KeptBase | None = None,
) -> LoadedModel:
    """Load a model or a PEFT adapter on its base, for the task that a file describes.

    Code that comes with a model is never run. The task is what the model's architecture says,
    unless the file does. `head` is a file with the head's parameters for a model stored without, in
    place of the task file's. The dtype is the one that holds what is stored, the device a GPU if
    there is one, unless given. Of an adapter, only what it changes takes gradients, and for LoRA
    parameters that match a pattern of `also`. With `kept` the base of one adapter is used again
    for the next, and the model of the first is gone then.
    """
    if device is not None and device_map is not None:
        raise DataError("give either a device or a device_map, not both")
    file = file or TaskFile()
    opened = open_model(source)
    head = head or file.head
    loading = Loading(
        opened,
        opened.read_config(),
        None if head is None else open_checkpoint(head),
        choose_dtype(dtype, opened.base),
        device_map,
        file,
        file.options(need_targets=need_targets),
        kept or KeptBase(),
    )
    loaded = loading.adapted(also) if opened.adapter is not None else loading.full()
    loaded.model.eval()
    if device_map is None:
        move(loaded.model, device)
    return loaded


@dataclass(frozen=True)
class Loading:
    """A model that is being loaded: what was asked for, opened and checked."""

    opened: ModelFolder
    config: Any  # of the model, changed as its head needs it
    head: Checkpoint | None
    dtype: torch.dtype
    device_map: str | Mapping[str, Any] | None
    file: TaskFile = field(default_factory=TaskFile)
    options: TaskOptions = field(default_factory=TaskOptions)
    kept: KeptBase = field(default_factory=KeptBase)

    def full(self) -> LoadedModel:
        """Load a full model, whose head may be in another file."""
        checkpoint, head = self.opened.checkpoint, self.head
        if head is None and (prompts := self.options.class_prompts):
            labels = self.options.labels
            head = make_text_head(checkpoint, self.config, labels, prompts, self.dtype)
        if head is not None and is_plain_head(head):
            loaded = self._encoder(head)
        else:
            loaded = self._model({})
        known = {*loaded.names, *loaded.head_names}
        unknown = unmatched_names(loaded.model, known)
        if unknown:
            loaded.notes.append(
                f"{checkpoint.label}: no tensor of its own was found for {len(unknown)} "
                f"parameters, such as '{unknown[0]}'"
            )
        if self.device_map == EMPTY:  # parts of experts are filled as they are stored, one by one
            keep_apart(loaded.model)
        for parameter in loaded.model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return loaded

    def adapted(self, also: Sequence[str]) -> LoadedModel:
        """Load an adapter on its base."""
        checkpoint, adapter, base = self.opened.checkpoint, self.opened.adapter, self.opened.base
        assert adapter is not None
        loaded = self._model(peft_saved(checkpoint.specs))
        model, head_names = loaded.model, loaded.head_names
        if adapter.kind.is_folded:
            adapted, names = fold_into(model, adapter, base, also, set(head_names))
            self.kept.undo = partial(unfold, model, adapted, names)
            names = {name: stored for name, stored in names.items() if name not in head_names}
            return replace(loaded, checkpoint=adapted, names=names, base=base)
        apart = {name: model.get_parameter(name).detach() for name in head_names}
        with_vectors: Any = put_adapter_on(model, checkpoint, apart)
        self.kept.undo = with_vectors.unload
        names, of_head = match_adapter_names(with_vectors, checkpoint, head_names)
        return LoadedModel(
            with_vectors, loaded.task, checkpoint, names, of_head, base, self.head, loaded.notes
        )

    def _model(self, of_adapter: Mapping[str, TensorSpec]) -> LoadedModel:
        """A model of transformers, its head from a file or, later, from the adapter."""
        base, config, head = self.opened.base, self.config, self.head
        inferred = read_record(head).kind or kind_of_model(config, self.opened.adapter)
        kind = choose_kind(self.opened.label, self.file.kind, inferred, config)
        model, head_names, notes = self.place(kind.model_class(base.label, config), of_adapter)
        own: Any = model.config
        if getattr(own, "use_cache", False):
            own.use_cache = False  # keys and values are for generating text
        task = make_task(kind, model, self.opened, self.file.tokenizer, self.options)
        names = {n: s for n, s in match_names(model, base).items() if n not in head_names}
        return LoadedModel(model, task, base, names, head_names, None, head, notes)

    def place(
        self, model_class: Any, of_adapter: Mapping[str, TensorSpec]
    ) -> tuple[nn.Module, dict[str, str], list[str]]:
        """A model of a class, with its head; the head's parameters in its file, and notes."""
        base, config, head = self.opened.base, self.config, self.head
        given = dict(of_adapter) | (peft_saved(head.specs) if head is not None else {})
        supplied: set[str] = set()
        head_names: dict[str, str] = {}
        if given:
            num_classes = num_classes_of_head(model_class, config, given)
            if num_classes is not None and num_classes != config.num_labels:
                config.num_labels = num_classes
            empty = skeleton(model_class, config)
            if head is not None:
                head_names = head_parameters(empty, head)
            supplied = set(head_names) | {n for n, _ in empty.named_parameters() if n in of_adapter}
        # What must be the same for a base to be used again.
        key = (
            base.place,
            model_class,
            config.num_labels,
            self.dtype,
            str(self.device_map),
            frozenset(supplied),
        )
        model, notes = self.kept.take(
            key,
            lambda: load_pretrained(
                model_class,
                base,
                config,
                self.dtype,
                self.device_map,
                supplied=supplied,
                partly_used=bool(given),
            ),
        )
        if head is not None:
            notes += put_head(model, head, head_names)
            _name_classes(model, read_record(head))
        return model, head_names, notes

    def _encoder(self, head: Checkpoint) -> LoadedModel:
        """An encoder with a linear layer on it."""
        checkpoint = self.opened.checkpoint
        model, notes = load_encoder_with_head(
            checkpoint, head, self.config, self.dtype, self.device_map
        )
        encoder: Any = model.encoder
        inferred = kind_of_encoder(encoder.main_input_name)
        kind = choose_kind(self.opened.label, self.file.kind, inferred, self.config)
        task = make_task(kind, encoder, self.opened, self.file.tokenizer, self.options)
        names = {f"encoder.{n}": stored for n, stored in match_names(encoder, checkpoint).items()}
        if model.scale is not None:
            names["scale.logit_scale"] = "logit_scale"
        head_names = {f"head.{stored}": stored for stored in head.specs}
        return LoadedModel(model, task, checkpoint, names, head_names, None, head, notes)


def make_task(
    kind: TaskKind,
    model: nn.Module,
    opened: ModelFolder,
    tokenizer: str | None,
    options: TaskOptions,
) -> Task[Any]:
    """The task as a model does it; tokenizer or image processor are the model's, unless given."""
    folders = opened.folders
    folder = next((f for f in folders if has_any(f, kind.files)), folders[-1])
    if tokenizer is not None:
        folder = local_path(tokenizer)
        if not folder.is_dir():
            raise DataError(
                f"{tokenizer}: expected a folder with a tokenizer, found no such folder"
            )
    with quiet():
        return kind(model, folder, options)


def move(model: nn.Module, device: str | None) -> None:
    """Put a model on a device; by default on a GPU, if there is one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch raises either for what is not there
        raise DataError(
            f"device '{device}': the model cannot be put there ({first_line(error)})"
        ) from error


def _name_classes(model: nn.Module, record: HeadRecord) -> None:
    """Call classes what a head's file does: those in the base's configuration are others."""
    config: Any = model.config
    numbered = [f"LABEL_{number}" for number in range(config.num_labels)]
    names = record.labels if len(record.labels or ()) == len(numbered) else numbered
    config.id2label = dict(enumerate(names or numbered))
    config.label2id = {name: number for number, name in config.id2label.items()}
    if record != HeadRecord():
        config.problem_type = record.problem_type
