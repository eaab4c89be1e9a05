"""A trained model as a folder that others can load."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.companions import companion_files, copy_companions
from matsmerge.lab.training.joint_model import JointModel
from matsmerge.models.pretrained import quiet

Writer = Callable[[Path], None]

# What is written with the weights, or is about another run.
_OWN_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "merge.json",
    ".paths.json",
    "training.json",
    "*.py",
)


def writer(model: nn.Module, use_cache: bool | None) -> Writer:
    """As `save_pretrained` does it, full model or adapter."""
    own: Any = model

    def write(folder: Path) -> None:
        with quiet():
            if hasattr(own, "peft_config"):
                # Otherwise PEFT asks the hub whether the vocabulary has grown.
                own.save_pretrained(str(folder), save_embedding_layers=False)
                (folder / "README.md").unlink(missing_ok=True)  # a form to fill in
                return
            _set_use_cache(own.config, use_cache)
            own.save_pretrained(str(folder))

    return write


def joint_writer(
    joint: JointModel, names: Sequence[str], head: Set[str], use_cache: bool | None
) -> Writer:
    """The encoder, and heads beside it as a merge keeps them."""

    def write(folder: Path) -> None:
        encoder: Any = joint.encoder
        _set_use_cache(encoder.config, use_cache)
        encoder.config.num_labels = 2  # what no encoder says anything of
        with quiet():
            encoder.save_pretrained(str(folder))
        for name, model in zip(names, joint.models, strict=True):
            write_head(folder, name, {n: model.get_parameter(n) for n in sorted(head)})

    return write


def writer_like(
    checkpoint: Checkpoint,
    model: nn.Module,
    names: Mapping[str, str],
    heads: Mapping[str, Mapping[str, str]],
) -> Writer:
    """All tensors of a checkpoint, with the values that a model's parameters now have.

    `names` are the parameters' names in it; `heads` those in the file of each head.
    """

    def write(folder: Path) -> None:
        tensors = {name: checkpoint[name] for name in checkpoint.specs}
        for name, stored in names.items():
            tensors[stored] = model.get_parameter(name).detach().cpu().contiguous()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        assert checkpoint.folder is not None
        config = [p for p in companion_files(checkpoint.folder) if p.name == "config.json"]
        copy_companions(config, folder, None)
        for head, stored_names in heads.items():
            write_head(folder, head, {s: model.get_parameter(n) for n, s in stored_names.items()})

    return write


def write_head(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """A head in a file of its own, `heads/NAME.safetensors`."""
    (folder / "heads").mkdir(exist_ok=True)
    values = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    save_file(values, folder / "heads" / f"{name}.safetensors", {"format": "pt"})


def copy_processor(folders: Sequence[Path], target: Path) -> None:
    """Tokenizer and image processor, from the first of the folders that has each file."""
    for folder in folders:
        for path in companion_files(folder):
            is_own = any(fnmatchcase(path.name, pattern) for pattern in _OWN_FILES)
            if not is_own and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)


def write_manifest(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """What was done, written last."""
    (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _set_use_cache(config: Any, use_cache: bool | None) -> None:
    """Training turns it off; the folder has it as the base does, or not at all."""
    if use_cache is not None:
        config.use_cache = use_cache
    elif "use_cache" in vars(config):
        del config.use_cache
