"""Heads for new classes: one on an encoder that has none or another, or several on one encoder."""

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn

from matsmerge.errors import DataError
from matsmerge.models.heads import class_dimensions
from matsmerge.models.model_folder import ModelFolder
from matsmerge.models.parameter_names import match_names
from matsmerge.models.pretrained import load_pretrained, quiet, skeleton
from matsmerge.tasks.kinds import TaskKind


def load_classifier(
    origin: ModelFolder,
    kind: TaskKind,
    names: list[str],
    dtype: torch.dtype,
    *,
    seed: int,
    fresh: bool = False,
) -> tuple[nn.Module, set[str], list[str]]:
    """A model with a head for these classes, the parameters of the head, and notes.

    The checkpoint's own head stays if it is for the same classes, unless a fresh one is asked
    for. What is fresh depends on the seed alone.
    """
    checkpoint, config = origin.base, origin.read_config()
    label = checkpoint.label
    auto_class = kind.model_class(label, config)
    same = _same_classes(config, names)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    config.problem_type = None
    if getattr(config, "use_cache", None):
        config.use_cache = False
    with quiet():
        empty = skeleton(auto_class, config)
        head = _head_parameters(empty, auto_class, config)
    poolers = {n for n, _ in empty.named_parameters() if "pooler" in n.split(".")}
    torch.manual_seed(seed)
    model, notes = load_pretrained(
        auto_class, checkpoint, config, dtype, None, supplied=head | poolers, partly_used=True
    )
    stored = set(match_names(model, checkpoint))
    if head <= stored and same and not fresh:
        return model, head, [*notes, f"{label}: its head is kept, for its classes are the task's"]
    if head <= {*checkpoint.specs, *checkpoint.aliases}:
        why = "as asked for" if same else "for its classes are not the task's"
        notes.append(f"{label}: a fresh head takes the place of its own, {why}")
    lacking = poolers - stored - head
    _initialise(model, head | lacking, seed)
    if lacking:
        notes.append(f"{label}: has no {', '.join(sorted(lacking))}, which are fresh")
    return model, head, notes


def _head_parameters(model: nn.Module, auto_class: Any, config: Any) -> set[str]:
    """The head's parameters: all outside the encoder, or those whose shape depends on classes."""
    names = [name for name, _ in model.named_parameters()]
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and isinstance(getattr(model, prefix, None), nn.Module):
        return {name for name in names if not name.startswith(f"{prefix}.")}
    return set(class_dimensions(auto_class, config))


def _initialise(model: nn.Module, names: Set[str], seed: int) -> None:
    """Initialise parameters as those of a new model."""
    torch.manual_seed(seed)
    own: Any = model
    for name in names:
        # Newer versions of transformers leave alone what they have marked.
        parameter: Any = model.get_parameter(name)
        if getattr(parameter, "_is_hf_initialized", False):
            parameter._is_hf_initialized = False
    # What is within comes first, as transformers has it.
    for path, module in reversed(list(model.named_modules())):
        of_module = {f"{path}.{name}" if path else name for name, _ in module.named_parameters()}
        if of_module and of_module <= names:
            with torch.no_grad():
                own._init_weights(module)


def _same_classes(config: Any, names: list[str]) -> bool:
    """Are these the classes a configuration lists? Those without names are 0, 1, ..."""
    listed = getattr(config, "id2label", None) or {}
    found = [str(listed.get(number)) for number in range(len(listed))]
    plain = [
        str(number) if name == f"LABEL_{number}" else name for number, name in enumerate(found)
    ]
    return names in (found, plain)


class JointModel(nn.Module):
    """Models that share everything but their heads."""

    def __init__(self, models: Sequence[nn.Module], head: Set[str]) -> None:
        super().__init__()
        first = models[0]
        prefix = getattr(first, "base_model_prefix", "")
        if not isinstance(getattr(first, prefix, None), nn.Module):
            raise DataError(
                f"{type(first).__name__} has no encoder of its own beside its head, and cannot be "
                "trained on several tasks at once"
            )
        self.models = nn.ModuleList(models)
        for other in models[1:]:
            _share(first, other, head)

    @property
    def encoder(self) -> nn.Module:
        first = self.models[0]
        encoder: nn.Module = getattr(first, str(first.base_model_prefix))
        return encoder


def _share(first: nn.Module, other: nn.Module, head: Set[str]) -> None:
    """Make a model use the parameters and buffers of another, except for its head."""
    for name, parameter in list(first.named_parameters(remove_duplicate=False)):
        if name not in head:
            path, _, leaf = name.rpartition(".")
            setattr(other.get_submodule(path), leaf, parameter)
    for name, buffer in list(first.named_buffers(remove_duplicate=False)):
        path, _, leaf = name.rpartition(".")
        other.get_submodule(path)._buffers[leaf] = buffer
