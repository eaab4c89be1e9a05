"""PEFT adapters on their base: (IA)^3 as PEFT runs it, LoRA folded into the weights.

Statistics of (IA)^3 are about its vectors, those of LoRA about the weights it changes.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from matsmerge.adapters.adapted_checkpoint import AdaptedCheckpoint, check_ties
from matsmerge.adapters.adapter import PREFIX, Adapter
from matsmerge.checkpoints.alignment import matches
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.data.row_problems import library_errors, refuse
from matsmerge.errors import DataError
from matsmerge.models.parameter_names import match_names
from matsmerge.models.pretrained import quiet
from matsmerge.optional_import import import_optional

_ADAPTER = "default"  # the name PEFT gives an adapter that is the only one


def put_adapter_on(
    model: nn.Module, checkpoint: Checkpoint, head: Mapping[str, Tensor]
) -> nn.Module:
    """The model with the adapter's parameters beside its own; only they take gradients.

    `head` are values of the model's own parameters that the adapter would bring, but that are
    stored apart.
    """
    peft = import_optional("peft")
    folder = str(checkpoint.folder)
    problem = f"{checkpoint.label}: peft cannot load it onto {type(model).__name__}"
    with library_errors(problem), quiet():  # warnings on keys are errors of `match_adapter_names`
        if not head:
            adapted: nn.Module = peft.PeftModel.from_pretrained(
                model, folder, is_trainable=True, adapter_name=_ADAPTER
            )
            return adapted
        config = peft.PeftConfig.from_pretrained(folder)
        config.inference_mode = False
        adapted = peft.get_peft_model(model, config, adapter_name=_ADAPTER)
        state = {name: checkpoint[name] for name in checkpoint.specs}
        state |= {f"{PREFIX}{name}": value for name, value in head.items()}
        peft.set_peft_model_state_dict(adapted, state, adapter_name=_ADAPTER)
        return adapted


def fold_into(
    model: nn.Module, adapter: Adapter, base: Checkpoint, also: Sequence[str], head: Set[str]
) -> tuple[AdaptedCheckpoint, dict[str, str]]:
    """Give a base's model the weights it has with a LoRA; only those take gradients.

    `also` are patterns of other parameters that do; those of a `head` that was given stay as they
    are. Returns the full model as a checkpoint, and the model's parameters in it.
    """
    adapted = AdaptedCheckpoint(base, adapter, match_names(model, base))
    check_ties(adapted)
    names = match_names(model, adapted)
    lacking = adapted.changed - set(names.values())
    refuse(
        f"{adapter.label}: {type(model).__name__} has no place for '{n}'" for n in sorted(lacking)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_changed = names.get(name) in adapted.changed and name not in head
            if is_changed and parameter.is_meta:
                raise DataError(
                    f"{adapter.label}: '{name}' is kept out of memory by the device map, and a "
                    "LoRA has to change it; use devices that hold the whole model"
                )
            if is_changed:
                parameter.copy_(adapted[names[name]])
            parameter.requires_grad_(
                parameter.is_floating_point() and (is_changed or matches(name, also))
            )
    return adapted, names


def unfold(model: nn.Module, adapted: AdaptedCheckpoint, names: Mapping[str, str]) -> None:
    """Give a model its base's values again."""
    base = adapted.base
    with torch.no_grad():
        for name, stored in names.items():
            if stored in adapted.changed and stored in base.specs:
                parameter = model.get_parameter(name)
                if parameter.shape == base.specs[stored].shape:
                    parameter.copy_(base[stored])


def match_adapter_names(
    model: nn.Module, checkpoint: Checkpoint, head_names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Map trainable parameters to the adapter's tensors, and a separate head's to its own."""
    names: dict[str, str] = {}
    of_head: dict[str, str] = {}
    problems = []
    for name, parameter in model.named_parameters():
        stored = stored_name(name)
        spec = checkpoint.specs.get(checkpoint.aliases.get(stored, stored))
        if (own := head_names.get(stored.removeprefix(PREFIX))) is not None:
            of_head[name] = own
        elif not parameter.requires_grad:
            continue
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
        if stored not in known and stored.removeprefix(PREFIX) not in head_names
    ]
    refuse(problems)
    return names, of_head


def stored_name(name: str) -> str:
    """A parameter's name as PEFT saves it: without the adapter's own name."""
    name = name.replace(f".modules_to_save.{_ADAPTER}.", ".")
    return name.replace(f".{_ADAPTER}.", ".").removesuffix(f".{_ADAPTER}")


def peft_saved(specs: Mapping[str, Any]) -> dict[str, Any]:
    """An adapter's tensors under the base's names for them."""
    return {name.removeprefix(PREFIX): spec for name, spec in specs.items()}
