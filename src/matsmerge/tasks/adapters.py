"""PEFT adapters: loaded onto their base, not merged into it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from matsmerge.checkpoints.checkpoint import Checkpoint, first_line
from matsmerge.checkpoints.companions import read_json
from matsmerge.checkpoints.opening import open_checkpoint
from matsmerge.errors import CheckpointError, DataError
from matsmerge.tasks.heads import ADAPTER_PREFIX
from matsmerge.tasks.optional_import import import_optional
from matsmerge.tasks.pretrained import quiet
from matsmerge.tasks.problems import shorten

_ADAPTER = "default"  # the name PEFT gives an adapter that is the only one


@dataclass(frozen=True)
class AdapterSettings:
    """What `adapter_config.json` says."""

    base: Checkpoint
    task_type: str | None


def is_adapter(folder: Path) -> bool:
    """Is the folder one that PEFT saved?"""
    if not (folder / "adapter_config.json").is_file():
        return False
    if any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        raise DataError(
            f"{folder}: holds both a model and an adapter (adapter_config.json); "
            "move one of them to a folder of its own"
        )
    return True


def read_adapter_settings(folder: Path) -> AdapterSettings:
    """Read the adapter's configuration and open its base."""
    path = folder / "adapter_config.json"
    content = read_json(path)
    name, revision = content.get("base_model_name_or_path"), content.get("revision")
    if not isinstance(name, str) or not name:
        raise DataError(f"{path}: expected the base's name in 'base_model_name_or_path'")
    on_hub = revision and not Path(name).exists()
    try:
        base = open_checkpoint(f"{name}@{revision}" if on_hub else name)
    except CheckpointError as error:
        raise DataError([f"{path}: its base: {problem}" for problem in error.problems]) from error
    if base.folder is None:
        raise DataError(f"{path}: its base '{name}' is not a model's folder")
    task_type = content.get("task_type")
    return AdapterSettings(base, None if task_type is None else str(task_type))


def put_adapter_on(
    model: nn.Module, checkpoint: Checkpoint, head: Mapping[str, Tensor]
) -> nn.Module:
    """The model with the adapter's parameters beside its own; only they take gradients.

    `head` are values of the model's own parameters that the adapter would bring, but that are
    stored apart.
    """
    peft = import_optional("peft")
    folder, label = str(checkpoint.folder), checkpoint.label
    try:
        with quiet():  # its warnings on keys are errors of `match_adapter_names`
            config = peft.PeftConfig.from_pretrained(folder)
            if config.is_prompt_learning:
                raise DataError(
                    f"{label}: is a {config.peft_type.value} adapter, which adds tokens to the "
                    "input; expected one that changes modules, such as IA3 or LORA"
                )
            if not head:
                adapted: nn.Module = peft.PeftModel.from_pretrained(
                    model, folder, is_trainable=True, adapter_name=_ADAPTER
                )
                return adapted
            config.inference_mode = False
            adapted = peft.get_peft_model(model, config, adapter_name=_ADAPTER)
            state = {name: checkpoint[name] for name in checkpoint.specs}
            state |= {f"{ADAPTER_PREFIX}{name}": value for name, value in head.items()}
            peft.set_peft_model_state_dict(adapted, state, adapter_name=_ADAPTER)
            return adapted
    except DataError:
        raise
    except Exception as error:  # unknown adapters, targets the base does not have, shapes
        raise DataError(
            f"{label}: peft cannot load it onto {type(model).__name__} ({first_line(error)})"
        ) from error


def match_adapter_names(
    model: nn.Module, checkpoint: Checkpoint, head_names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Trainable parameters to the adapter's tensors, and to those of a head that is apart."""
    names: dict[str, str] = {}
    of_head: dict[str, str] = {}
    problems = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        stored = stored_name(name)
        spec = checkpoint.specs.get(checkpoint.aliases.get(stored, stored))
        if (own := head_names.get(stored.removeprefix(ADAPTER_PREFIX))) is not None:
            of_head[name] = own
        elif spec is None:
            problems.append(f"{checkpoint.label}: lacks '{stored}', which the adapter needs")
        elif spec.shape != tuple(parameter.shape):
            problems.append(
                f"{checkpoint.label}: '{stored}' is {list(spec.shape)}, expected "
                f"{list(parameter.shape)}"
            )
        else:
            names[name] = checkpoint.aliases.get(stored, stored)
    known = {*names.values(), *of_head.values()}
    problems += [
        f"{checkpoint.label}: '{stored}' has no place in the base with this adapter"
        for stored in checkpoint.specs
        if stored not in known
    ]
    if problems:
        raise DataError(shorten(problems))
    return names, of_head


def stored_name(name: str) -> str:
    """A parameter's name as PEFT saves it: without the adapter's own name."""
    name = name.replace(f".modules_to_save.{_ADAPTER}.", ".")
    return name.replace(f".{_ADAPTER}.", ".").removesuffix(f".{_ADAPTER}")


def peft_saved(specs: Mapping[str, Any]) -> dict[str, Any]:
    """An adapter's tensors under the names the base's own parameters have."""
    return {name.removeprefix(ADAPTER_PREFIX): spec for name, spec in specs.items()}
