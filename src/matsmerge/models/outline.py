"""What the tensors of a stored model are to the model: parameters of which modules."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.summary import tensor_kind
from matsmerge.models.parameter_names import match_names
from matsmerge.models.pretrained import architecture_of, empty_model
from matsmerge.optional_import import import_optional


@dataclass(frozen=True)
class Outline:
    """A model without values; guessed from names and shapes where nobody knows the model."""

    parameters: Mapping[str, str]  # stored tensor -> parameter of the model
    linear: Mapping[str, bool]  # stored weight of a linear module -> is it (in, out)?
    tied: frozenset[str]  # stored tensors that several modules use
    config: Any = None  # of the model, if it is known


def outline_of(checkpoint: Checkpoint) -> Outline:
    """Ask transformers for a model's modules, or guess."""
    folder = checkpoint.folder
    model = None if folder is None else empty_model(folder, _stored_class)
    if model is None:
        linear = [
            name
            for name, spec in checkpoint.specs.items()
            if name.endswith(".weight") and tensor_kind(name, spec) == "matrix"
        ]
        return Outline({n: n for n in checkpoint.specs}, dict.fromkeys(linear, False), frozenset())
    names = match_names(model, checkpoint)
    layouts = {}
    for module_name, module in model.named_modules():
        is_transposed = type(module).__name__ == "Conv1D"
        stored = names.get(f"{module_name}.weight")
        if stored is not None and (is_transposed or type(module) is nn.Linear):
            layouts[stored] = is_transposed
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    tied = (names.get(name) for name, p in model.named_parameters() if uses[id(p)] > 1)
    return Outline(
        {stored: name for name, stored in names.items()},
        layouts,
        frozenset(stored for stored in tied if stored is not None),
        model.config,
    )


def _stored_class(config: Any) -> Any:
    """The class that a model was saved from, if transformers has it."""
    transformers = import_optional("transformers")
    return getattr(transformers, architecture_of(config), transformers.AutoModel)
