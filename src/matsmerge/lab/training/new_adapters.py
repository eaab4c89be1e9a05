"""A new PEFT adapter on a model, or an earlier one to be trained on."""

from collections.abc import Set
from typing import Any

from torch import nn

from matsmerge.adapters.adapter import Adapter, AdapterKind
from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.checkpoints.source import local_path
from matsmerge.errors import DataError, closest
from matsmerge.lab.training.training_options import TrainingOptions
from matsmerge.models.peft_model import match_adapter_names, put_adapter_on
from matsmerge.models.pretrained import quiet
from matsmerge.optional_import import import_optional


def put_new_adapter(
    model: nn.Module,
    kind: AdapterKind,
    task_type: str | None,
    options: TrainingOptions,
    head: Set[str],
    base: str,
) -> nn.Module:
    """The model with an adapter of a kind, of which only it and the head are trained.

    `task_type` and `base` are what its configuration says of the task, and of the model it is for.
    """
    peft = import_optional("peft")
    _check_targets(model, options)
    given: dict[str, Any] = {
        "task_type": task_type,
        "target_modules": options.target_modules,
        "modules_to_save": _head_modules(model, head) or None,
    }
    settings = kind.peft_settings(peft, model, options.of_adapters, given)
    try:
        with quiet():
            adapted: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:  # architectures for which PEFT has no defaults, unfit modules
        raise DataError(
            f"{type(model).__name__}: peft cannot put {kind.name} on it ({first_line(error)}); say "
            f"where it goes with --target-modules; there is {', '.join(_linear_names(model))}"
        ) from error
    is_path = local_path(base).exists()
    name, _, revision = (base, "", "") if is_path else base.partition("@")
    _set_base(adapted, name, revision or None)
    return adapted


def put_earlier_adapter(model: nn.Module, adapter: Adapter, fresh: Set[str]) -> nn.Module:
    """The model with an adapter as it is stored, except for `fresh` parameters, which stay.

    Tensors that the adapter lacks, or that have no place in the model, are an error.
    """
    values = {name: model.get_parameter(name).detach().clone() for name in fresh}
    adapted = put_adapter_on(model, adapter.checkpoint, values)
    match_adapter_names(adapted, adapter.checkpoint, {name: name for name in fresh})
    content = adapter.config.content
    _set_base(adapted, content.get("base_model_name_or_path"), content.get("revision"))
    return adapted


def _head_modules(model: nn.Module, head: Set[str]) -> list[str]:
    """The largest modules that hold nothing but parameters of the head."""
    found: list[str] = []
    for path, module in model.named_modules():
        own = {f"{path}.{name}" for name, _ in module.named_parameters()}
        inside = any(path.startswith(f"{other}.") for other in found)
        if path and own and own <= head and not inside:
            found.append(path)
    return found


def _linear_names(model: nn.Module) -> list[str]:
    """The last parts of the names of linear maps."""
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    return sorted(names)


def _check_targets(model: nn.Module, options: TrainingOptions) -> None:
    modules = [name for name, _ in model.named_modules()]
    DataError.raise_all(
        f"--{option.replace('_', '-')}: {type(model).__name__} has no module '{target}'"
        f"{closest(target, _linear_names(model))}"
        for option, targets in options.of_adapters.items()
        if option.endswith("_modules")
        for target in targets or ()
        if not any(name == target or name.endswith(f".{target}") for name in modules)
    )


def _set_base(adapted: Any, name: str | None, revision: str | None) -> None:
    """Let the adapter's configuration name its base as the user does, not by its local folder."""
    for settings in adapted.peft_config.values():
        settings.base_model_name_or_path = name
        settings.revision = revision
