"""The output of merging adapters: an adapter again, or the full model it makes of its base."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from matsmerge.adapters.adapted_checkpoint import AdaptedCheckpoint, check_ties
from matsmerge.adapters.adapter import PREFIX, AdapterConfig
from matsmerge.adapters.adapter_folder import make_adapter
from matsmerge.adapters.ia3 import ia3_config
from matsmerge.adapters.joint_space import JointSpace
from matsmerge.adapters.lora import LoraLayer, lora_config
from matsmerge.checkpoints.alignment import Alignment
from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec
from matsmerge.checkpoints.filled_checkpoint import FilledCheckpoint
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.engine.merge_inputs import MergeInputs, adapted
from matsmerge.errors import RecipeError
from matsmerge.linalg.low_rank import nearest_factors
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.rules import Rule

# What became of each layer of a LoRA, by module: rank, and the share of the change it keeps.
KeptEnergy = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Finish:
    """The last step of a merge of adapters, which are small and merged in memory."""

    specs: Mapping[str, TensorSpec]  # of what is written
    make: Callable[[Checkpoint], tuple[Checkpoint, KeptEnergy]]  # from the merged values


@dataclass(frozen=True)
class AdapterOutput:
    """How merged adapters are written: as an adapter, or folded into their base.

    Empty for full models, which are written as they are merged. `layers` are the weights that
    a LoRA is made of while they are merged, by name; `names` what other tensors are called in the
    adapter.
    """

    config: Mapping[str, Any] | None = None  # of the adapter that is written
    layers: Mapping[str, LoraLayer] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    finish: Finish | None = None
    # What is written, seen as a full model or as vectors: under the names of what is merged.
    as_merged: Callable[[Checkpoint], Checkpoint] = field(default=lambda written: written)


def plan_output(
    recipe: Recipe, inputs: MergeInputs, alignment: Alignment, rules: Mapping[str, Rule]
) -> AdapterOutput:
    """Plan the output of a merge of adapters; that of full models is empty."""
    if inputs.view == "vectors":
        output = _vectors(recipe, inputs, alignment)
    elif inputs.view == "joint":
        output = _joint(recipe, inputs, alignment, rules)
    elif inputs.writes_adapter:
        output = _folded(recipe, inputs, alignment)
    else:
        return AdapterOutput()
    if output.config is not None and any(model.heads for model in alignment.models):
        # For a task with a head PEFT would look for one in the adapter.
        return replace(output, config={**output.config, "task_type": None})
    return output


def _vectors(recipe: Recipe, inputs: MergeInputs, alignment: Alignment) -> AdapterOutput:
    adapters = list(inputs.adapters.values())
    content = ia3_config(adapters, _modules_to_save(inputs, alignment))
    if inputs.writes_adapter:
        return AdapterOutput(content)
    specs = {name: alignment.models[0].spec(name) for name in alignment.names}
    return AdapterOutput(finish=_folding(recipe, inputs, content, specs))


def _folded(recipe: Recipe, inputs: MergeInputs, alignment: Alignment) -> AdapterOutput:
    """The layers of a LoRA: all weights that some adapter changes."""
    dtype, models = _dtype(recipe, inputs), inputs.on_base.values()
    layers: dict[str, LoraLayer] = {}
    names: dict[str, str] = {}
    for name in alignment.names:
        stored = alignment.models[0].names[name]
        having = [m for m in models if stored in m.changed]
        changes = [(m, m.fitted.changes[stored]) for m in having if stored in m.fitted.changes]
        found = [(m, c) for m, c in changes if c.low_rank is not None]
        whole = [m for m in having if stored in m.fitted.values and stored not in m.fitted.changes]
        if found and not whole:
            first, change = found[0]
            ranks = sum(c.low_rank.rank for _, c in found if c.low_rank is not None)
            layers[name] = LoraLayer(
                first.fitted.modules[stored],
                tuple(alignment.models[0].spec(name).shape),
                ranks if not isinstance(recipe.rank, int) else recipe.rank,
                dtype,
                change.is_transposed,
                "embedding_A" in first.adapter.modules[first.fitted.modules[stored]],
            )
        elif having:
            names[name] = _own_name(stored, (whole or having)[0])
    modules = {layer.module for layer in layers.values()}
    written = {n: tensor_name(own, modules) for n, own in names.items()}
    layers = limited(recipe.rank if isinstance(recipe.rank, int) else None, layers)
    content = _lora_content(inputs, alignment, list(layers.values()), names.values())
    base, first_adapter = inputs.pretrained, next(iter(inputs.adapters.values()))
    assert base is not None
    config = AdapterConfig(first_adapter.config.path, first_adapter.kind, content)

    def as_merged(factors: Checkpoint) -> Checkpoint:
        return adapted(base, make_adapter(factors, config))

    return AdapterOutput(content, layers, written, as_merged=as_merged)


def _own_name(stored: str, model: AdaptedCheckpoint) -> str:
    """A parameter's name in the adapter's own terms."""
    own = model.fitted.parameters.get(stored)
    if own is not None:
        return own
    weight = stored.removesuffix("bias") + "weight"  # a bias that goes with a change of the weight
    return f"{model.fitted.modules[weight]}.bias"


def tensor_name(parameter: str, modules: Iterable[str]) -> str:
    """What PEFT calls a parameter that an adapter brings whole."""
    module, _, attribute = parameter.rpartition(".")
    return f"{PREFIX}{module}.base_layer.{attribute}" if module in modules else PREFIX + parameter


def limited(rank: int | None, layers: Mapping[str, LoraLayer]) -> dict[str, LoraLayer]:
    """Layers with a rank they have room for; one that was asked for must be possible."""
    if rank is not None:
        check_rank(rank, layers)
    return {n: replace(x, rank=min(x.rank, *x.matrix_shape)) for n, x in layers.items()}


def check_rank(rank: int, layers: Mapping[str, LoraLayer]) -> None:
    """Refuse a rank that no layer has room for; smaller layers get the rank they have room for."""
    shapes = {name: layer.matrix_shape for name, layer in layers.items()}
    largest = max(shapes, key=lambda name: min(shapes[name]))
    if rank > min(shapes[largest]):
        raise RecipeError(
            f"rank: {rank} is larger than every layer, even than '{largest}' "
            f"{list(shapes[largest])}; choose at most {min(shapes[largest])}"
        )


def _joint(
    recipe: Recipe, inputs: MergeInputs, alignment: Alignment, rules: Mapping[str, Rule]
) -> AdapterOutput:
    space, dtype = inputs.space, _dtype(recipe, inputs)
    assert space is not None
    is_concatenated = recipe.rank == "concatenate"
    rank_of = space.num_ranks if is_concatenated else space.num_outputs
    layers = [space.layer(m, rank_of(m), dtype) for m in space.modules]
    if isinstance(recipe.rank, int):
        check_rank(recipe.rank, {layer.module: layer for layer in layers})
        layers = [replace(layer, rank=min(layer.rank, recipe.rank)) for layer in layers]
    weights = {f"{module}.weight" for module in space.modules}
    others = [name for name in alignment.names if name not in weights]
    names = {n: tensor_name(n, space.modules) for n in others}
    content = _lora_content(inputs, alignment, layers, others)
    reference = alignment.models[0]
    specs = {n: spec for layer in layers for n, spec in layer.specs.items()}
    for n, written in names.items():
        spec = reference.spec(n)
        specs[written] = TensorSpec(recipe.torch_dtype or spec.dtype, spec.shape)

    def make(merged: Checkpoint) -> tuple[Checkpoint, KeptEnergy]:
        tensors: dict[str, Tensor] = {written: merged[n] for n, written in names.items()}
        kept: KeptEnergy = {}
        for layer in layers:
            weight = f"{layer.module}.weight"
            rule = rules[weight] if is_concatenated else None
            left, right, energy = _factors(space, layer, merged[weight], rule)
            tensors |= layer.tensors(left, right)
            kept[layer.module] = {"rank": layer.rank, "energy": energy}
        return InMemoryCheckpoint("merged", tensors), kept

    if inputs.writes_adapter:
        return AdapterOutput(content, finish=Finish(specs, make))
    folding = _folding(recipe, inputs, content, specs)

    def fold(merged: Checkpoint) -> tuple[Checkpoint, KeptEnergy]:
        adapter, kept = make(merged)
        return folding.make(adapter)[0], kept

    return AdapterOutput(finish=Finish(folding.specs, fold))


def _factors(
    space: JointSpace, layer: LoraLayer, coordinates: Tensor, rule: Rule | None
) -> tuple[Tensor, Tensor, float]:
    """The merged change as two factors; with a rule, the adapters' own, one beside the other."""
    if rule is not None:
        coefficients = rule.method.coefficients(rule.weights)
        assert coefficients is not None
        factors = zip(space.factors(layer.module), coefficients, strict=True)
        present = [(f[0] * c, f[1]) for f, c in factors if f is not None]
        return torch.cat([b for b, _ in present], 1), torch.cat([a for _, a in present]), 1.0
    basis = space.basis(layer.module)
    if layer.rank == len(coordinates):
        return basis, space.on_inputs(layer.module, coordinates), 1.0
    found = nearest_factors(coordinates, layer.rank)
    return basis @ found.left, space.on_inputs(layer.module, found.right), found.energy


def _folding(
    recipe: Recipe, inputs: MergeInputs, content: Mapping[str, Any], specs: Mapping[str, TensorSpec]
) -> Finish:
    """Fold a merged adapter into its base."""
    base, first = inputs.pretrained, next(iter(inputs.adapters.values()))
    assert base is not None
    config = AdapterConfig(first.config.path, first.kind, content)
    # Names and shapes are the same whatever the values will be.
    outline = adapted(base, make_adapter(FilledCheckpoint("merged", specs, {}, 1.0), config))
    check_ties(outline)
    written = {
        name: TensorSpec(recipe.torch_dtype or spec.dtype, spec.shape)
        if spec.dtype.is_floating_point
        else spec
        for name, spec in outline.specs.items()
    }

    def make(merged: Checkpoint) -> tuple[Checkpoint, KeptEnergy]:
        return adapted(base, make_adapter(merged, config)), {}

    return Finish(written, make)


def _dtype(recipe: Recipe, inputs: MergeInputs) -> torch.dtype:
    """The dtype of a LoRA: the one asked for, or that of the first adapter."""
    if recipe.torch_dtype is not None:
        return recipe.torch_dtype
    adapter = next(iter(inputs.adapters.values()))
    parts = next(iter(adapter.modules.values()))
    return adapter.checkpoint.specs[next(iter(parts.values()))].dtype


def _modules_to_save(inputs: MergeInputs, alignment: Alignment) -> list[str]:
    """Modules that adapters bring whole, but for heads that are kept apart."""
    found = {
        module
        for adapter in inputs.adapters.values()
        for module in adapter.config.content.get("modules_to_save") or []
    }
    apart = {part for m in alignment.models for head in m.heads for part in head.split(".")}
    held = {
        part
        for adapter in inputs.adapters.values()
        for name in adapter.values
        for part in name.split(".")
    }
    return [m for m in found if not apart & set(m.split(".")) and held & set(m.split("."))]


def _lora_content(
    inputs: MergeInputs,
    alignment: Alignment,
    layers: Sequence[LoraLayer],
    parameters: Iterable[str],
) -> dict[str, Any]:
    """The first adapter's configuration for layers, and parameters that are brought whole."""
    configs = [adapter.config for adapter in inputs.adapters.values()]
    # Only adapters of square weights need to say how these are stored.
    are_transposed = any(config.has_transposed_weights for config in configs)
    saved = _modules_to_save(inputs, alignment)
    biases = [
        name
        for name in parameters
        if name.endswith(".bias") and not any(f".{module}." in f".{name}" for module in saved)
    ]
    content = {**configs[0].content, "fan_in_fan_out": are_transposed}
    return lora_config(content, layers, biases, saved)
