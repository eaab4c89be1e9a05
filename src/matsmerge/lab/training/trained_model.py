"""A trained model as a folder that others can load."""

import shutil
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from matsmerge.checkpoints.safetensors_file import write_tensors
from matsmerge.lab.training.fresh_heads import JointModel
from matsmerge.models.model_folder import ModelFolder
from matsmerge.tasks.head_record import HEADS, HeadRecord
from matsmerge.tasks.loaded_model import LoadedModel


def write_model(model: Any, origin: ModelFolder, folder: Path) -> None:
    """Save a full model or an adapter with its `save_pretrained`."""
    if hasattr(model, "peft_config"):
        # Otherwise PEFT asks the hub whether the vocabulary has grown.
        model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # a form to fill in
        return
    # Training turns it off; the folder has it as the base does, or not at all.
    use_cache = getattr(origin.read_config(), "use_cache", None)
    if use_cache is not None:
        model.config.use_cache = use_cache
    elif "use_cache" in vars(model.config):
        del model.config.use_cache
    model.save_pretrained(str(folder))


def write_joint(
    joint: JointModel, names: Sequence[str], head: Set[str], origin: ModelFolder, folder: Path
) -> None:
    """Save the encoder, and the heads beside it as a merge does (heads/TASK.safetensors)."""
    encoder: Any = joint.encoder
    encoder.config.num_labels = 2  # what no encoder says anything of
    write_model(encoder, origin, folder)
    for name, model in zip(names, joint.models, strict=True):
        config: Any = model.config
        labels = [str(config.id2label[number]) for number in range(config.num_labels)]
        record = HeadRecord(architecture=type(model).__name__, labels=labels)
        _write_head(folder, name, {n: model.get_parameter(n) for n in sorted(head)}, record)


def write_as_stored(each: Sequence[LoadedModel], tasks: Sequence[str], folder: Path) -> None:
    """Save all tensors of the checkpoint with their trained values, and the head of each task.

    Models of several tasks share what is not their head.
    """
    first, checkpoint = each[0], each[0].checkpoint
    tensors = {name: checkpoint[name] for name in checkpoint.specs}
    for name, stored in first.names.items():
        tensors[stored] = first.model.get_parameter(name)
    write_tensors(folder / "model.safetensors", tensors, HeadRecord().metadata)
    assert checkpoint.folder is not None
    shutil.copyfile(checkpoint.folder / "config.json", folder / "config.json")
    for task, one in zip(tasks, each, strict=True):
        head = {stored: one.model.get_parameter(name) for name, stored in one.head_names.items()}
        _write_head(folder, task, head)


def _write_head(
    folder: Path, name: str, tensors: Mapping[str, torch.Tensor], record: HeadRecord | None = None
) -> None:
    (folder / HEADS).mkdir(exist_ok=True)
    path = folder / HEADS / f"{name}.safetensors"
    write_tensors(path, tensors, (record or HeadRecord()).metadata)
