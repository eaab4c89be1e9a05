"""An adapter: what it does to which parameters of its base.

Everything an adapter can do to a weight is one of

    W' = W + s B A                         LoRA
    W' = (W + s B A) * m / ||W + s B A||   DoRA; m and the norms belong to outputs
    W' = W * v                             (IA)^3; v belongs to outputs, or inputs if feedforward
    W' = V                                 values it brings whole: biases, `modules_to_save`

and what there is to do is known from headers and the configuration.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from matsmerge.adapters.adapter_config import CONFIG, AdapterConfig, is_adapter, read_adapter_config
from matsmerge.checkpoints.alignment import match_prefix
from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec
from matsmerge.errors import CheckpointError

PREFIX = "base_model.model."  # what PEFT puts in front of the names of the model's own

_LORA = re.compile(
    r"^(?P<module>.+)\.lora_(?P<part>(embedding_)?[AB]|magnitude_vector)(?P<of>\.\w+)?$"
)
_IA3 = re.compile(r"^(?P<module>.+)\.ia3_l$")
_HEADS = ("classifier", "score", "qa_outputs", "classification_head")
_MAX_LISTED = 5


@dataclass(frozen=True)
class LowRank:
    """Tensors with a weight's change B A, and the factor on it."""

    a: str
    b: str
    rank: int
    scaling: float


@dataclass(frozen=True)
class Change:
    """What becomes of one parameter, as it is stored; names are those of the adapter's tensors."""

    low_rank: LowRank | None = None
    added: str | None = None  # a vector to add, `scaling` times
    added_scaling: float = 1.0
    factors: str | None = None  # (IA)^3's vector, or DoRA's magnitudes
    is_normalized: bool = False  # DoRA
    along: int = 0  # the dimension that the factors belong to; 0 is that of rows
    is_transposed: bool = False  # stored as (in, out)


@dataclass(frozen=True)
class Adapter:
    """An adapter's tensors by what they do, under names of the model it was made for."""

    checkpoint: Checkpoint
    config: AdapterConfig
    modules: Mapping[str, Mapping[str, str]]  # module -> part ("A", "B", "ia3_l", ...) -> tensor
    values: Mapping[str, str]  # parameter -> tensor with its values

    @property
    def label(self) -> str:
        return self.checkpoint.label

    @property
    def heads(self) -> list[str]:
        """Parameters it brings whole that belong to its task alone."""
        modules = {name.rpartition(".")[0] for name in self.values if name.endswith(".weight")}
        return [n for n in self.values if is_head(n) and n.rpartition(".")[0] in modules]

    @property
    def own_values(self) -> dict[str, str]:
        """Values that are its own; weights it also changes are saved as its base has them."""
        return {n: tensor for n, tensor in self.values.items() if n not in self.weights}

    def ranks(self) -> dict[str, int]:
        """The rank of every module's change."""
        return {
            module: self.checkpoint.specs[parts.get("A") or parts["embedding_A"]].shape[0]
            for module, parts in self.modules.items()
        }

    @cached_property
    def weights(self) -> dict[str, str]:
        """The weight of every module it changes."""
        return {f"{module}.weight": module for module in self.modules}


def is_head(parameter: str) -> bool:
    return any(part in _HEADS for part in parameter.split("."))


def read_adapter(checkpoint: Checkpoint) -> Adapter | None:
    """The adapter in a checkpoint's folder, or None for a full model."""
    if not is_adapter(checkpoint.folder):
        if any(_LORA.match(name) or _IA3.match(name) for name in checkpoint.specs):
            raise CheckpointError(
                f"{checkpoint.label}: holds an adapter's tensors and no {CONFIG}, which says how "
                "to use them; give the folder that PEFT saved"
            )
        return None
    assert checkpoint.folder is not None
    return make_adapter(checkpoint, read_adapter_config(checkpoint.folder))


def make_adapter(checkpoint: Checkpoint, config: AdapterConfig) -> Adapter:
    """Sort an adapter's tensors, and check them against each other."""
    modules: dict[str, dict[str, str]] = {}
    values: dict[str, str] = {}
    problems = []
    pattern = _LORA if config.kind == "lora" else _IA3
    for tensor in checkpoint.specs:
        name = tensor.removeprefix(PREFIX)
        if name == tensor:
            problems.append(f"'{tensor}' does not begin with '{PREFIX}', as PEFT saves it")
            continue
        found = pattern.match(name)
        if found and config.kind == "ia3":
            modules.setdefault(_plain(found["module"]), {})["ia3_l"] = tensor
        elif found:
            part = found["part"] + ("" if found["of"] in (None, ".weight") else found["of"])
            modules.setdefault(_plain(found["module"]), {})[part] = tensor
        elif ".original_module." not in name and ".modules_to_save." not in name:
            values[_plain(name)] = tensor
    adapter = Adapter(checkpoint, config, modules, values)
    problems += _module_problems(adapter)
    if not modules and not problems:
        problems.append(f"holds no tensors of the type {config.content['peft_type']}")
    if problems:
        raise CheckpointError(_shortened([f"{checkpoint.label}: {p}" for p in problems]))
    return adapter


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".").removesuffix(".base_layer")


def _module_problems(adapter: Adapter) -> Iterator[str]:
    if adapter.config.kind == "ia3":
        return
    specs = adapter.checkpoint.specs
    for module, parts in adapter.modules.items():
        pair = [p for p in (("A", "B"), ("embedding_A", "embedding_B")) if set(p) <= parts.keys()]
        known = {*(pair[0] if pair else ()), "magnitude_vector", "B.bias"}
        if len(pair) != 1 or parts.keys() - known:
            yield f"'{module}' has {', '.join(sorted(parts))}; expected lora_A and lora_B"
            continue
        a, b = (specs[parts[p]] for p in pair[0])
        rank = adapter.config.rank(module)
        if not a.shape[:1] == b.shape[1:2] == (rank,):
            yield (
                f"'{module}' has factors {list(a.shape)} and {list(b.shape)}; {CONFIG} says rank "
                f"{rank}"
            )
        if adapter.config.uses_dora != ("magnitude_vector" in parts):
            has = "has a" if "magnitude_vector" in parts else "lacks the"
            yield f"'{module}' {has} magnitude vector, and use_dora is {adapter.config.uses_dora}"


@dataclass(frozen=True)
class Fitted:
    """An adapter on its base: what becomes of which of the base's tensors."""

    changes: Mapping[str, Change]  # tensor of the base -> what becomes of it
    values: Mapping[str, str]  # tensor of the base, or new -> tensor of the adapter
    modules: Mapping[str, str]  # weight in the base -> module, as the adapter names it
    parameters: Mapping[str, str]  # value in the base -> parameter, as the adapter names it


def names_in(adapter: Adapter, base: Checkpoint) -> dict[str, str]:
    """The adapter's parameters in the base's file, which may differ by a leading module."""
    own = [*adapter.weights, *adapter.values]
    rename, _ = match_prefix(base, {name: name for name in own})
    return {name: base.aliases.get(rename(name), rename(name)) for name in own}


def fit(adapter: Adapter, base: Checkpoint, names: Mapping[str, str] | None = None) -> Fitted:
    """Find what an adapter changes in a base, by name and shape; every misfit at once.

    `names` are tensors of the base by the adapter's parameters, where they are known better.
    """
    names = names_in(adapter, base) | dict(names or {})
    changes: dict[str, Change] = {}
    problems: list[str] = []
    modules: dict[str, str] = {}
    parameters = {names[name]: name for name in adapter.values}
    if len(parameters) < len(adapter.values):
        problems.append(f"brings values for two weights that {base.label} has as one")
    for weight, module in adapter.weights.items():
        name = names[weight]
        if name not in base.specs:
            problems.append(f"changes '{weight}', which {base.label} does not have")
            continue
        try:
            changes |= _changes_of(adapter, module, name, base)
            modules[name] = module
        except ValueError as error:
            problems.append(f"does not fit {base.label}: {error}")
    if problems:
        raise CheckpointError(
            _shortened([f"{adapter.label}: {p}; was it made for another base?" for p in problems])
        )
    values = {name: adapter.values[own] for name, own in parameters.items()}
    return Fitted(changes, values, modules, parameters)


def _changes_of(adapter: Adapter, module: str, weight: str, base: Checkpoint) -> dict[str, Change]:
    if adapter.config.kind == "ia3":
        return _ia3_changes(adapter, module, weight, base)
    parts, specs = adapter.modules[module], adapter.checkpoint.specs
    is_embedding = "embedding_A" in parts
    low_rank = LowRank(
        parts["embedding_A" if is_embedding else "A"],
        parts["embedding_B" if is_embedding else "B"],
        adapter.config.rank(module),
        adapter.config.scaling(module),
    )
    a, b, shape = specs[low_rank.a], specs[low_rank.b], base.specs[weight].shape
    change = _flat_shape(b)[0], _flat_shape(a)[1]
    stored = _flat_shape(base.specs[weight])
    is_transposed = stored == change[::-1] and len(shape) == 2
    if stored == change and is_transposed:
        is_transposed = is_embedding or adapter.config.has_transposed_weights
    elif stored != change and not is_transposed:
        raise ValueError(f"'{weight}' is {list(shape)}, its change is {list(change)}")
    found = {
        weight: Change(
            low_rank,
            factors=parts.get("magnitude_vector"),
            is_normalized="magnitude_vector" in parts,
            along=int(is_transposed),
            is_transposed=is_transposed,
        )
    }
    if "B.bias" in parts:
        bias = f"{weight.removesuffix('weight')}bias"
        found[bias] = Change(added=parts["B.bias"], added_scaling=low_rank.scaling)
        _check_length(found[bias].added, bias, 0, adapter.checkpoint, base)
    return found


def _ia3_changes(adapter: Adapter, module: str, weight: str, base: Checkpoint) -> dict[str, Change]:
    vector = adapter.modules[module]["ia3_l"]
    shape, stored = adapter.checkpoint.specs[vector].shape, base.specs[weight].shape
    # A vector of a linear layer shows in its shape what it scales; one of a convolution does not.
    is_linear = len(shape) == 2 and shape != (1, 1)
    of_inputs = shape[0] == 1 if is_linear else adapter.config.is_feedforward(module)
    num = adapter.checkpoint.specs[vector].num_elements
    along = int(of_inputs)
    if len(stored) == 2:
        fits = [stored[along] == num, stored[1 - along] == num]
        if adapter.config.has_transposed_weights if all(fits) else fits[1]:
            along = 1 - along
    _check_length(vector, weight, along, adapter.checkpoint, base)
    changes = {weight: Change(factors=vector, along=along)}
    bias = f"{weight.removesuffix('weight')}bias"
    if not of_inputs and bias in base.specs:
        changes[bias] = Change(factors=vector)
    return changes


def _check_length(
    tensor: str | None, parameter: str, along: int, adapter: Checkpoint, base: Checkpoint
) -> None:
    assert tensor is not None
    spec = base.specs.get(parameter)
    num = adapter.specs[tensor].num_elements
    if spec is None or spec.shape[along] != num:
        found = "missing" if spec is None else f"{list(spec.shape)}"
        raise ValueError(f"'{parameter}' is {found}, '{tensor}' has {num} elements")


def _flat_shape(spec: TensorSpec) -> tuple[int, int]:
    """Rows and columns: a convolution's filters as rows."""
    return spec.shape[0], spec.num_elements // max(1, spec.shape[0])


def _shortened(problems: list[str]) -> list[str]:
    more = len(problems) - _MAX_LISTED
    return problems if more <= 0 else [*problems[:_MAX_LISTED], f"and {more} more like these"]
