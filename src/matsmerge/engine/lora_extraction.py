"""The difference of two full models as a LoRA: a merge of one model, written as factors."""

import math
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

from matsmerge.adapters.adapter import is_head
from matsmerge.adapters.adapter_folder import read_adapter
from matsmerge.adapters.lora import LoraLayer, lora_config
from matsmerge.checkpoints.alignment import Alignment, align, matches, unmatched
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.companions import code_notes, companion_files
from matsmerge.checkpoints.filled_checkpoint import FilledCheckpoint, Stored
from matsmerge.checkpoints.public_names import public_name
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.checkpoints.summary import relative_change
from matsmerge.engine.adapter_output import AdapterOutput, limited, tensor_name
from matsmerge.engine.model_card import inherit_metadata
from matsmerge.engine.plan import make_plan
from matsmerge.engine.prepared_merge import PreparedMerge
from matsmerge.errors import CheckpointError, RecipeError
from matsmerge.models.outline import Outline, outline_of
from matsmerge.problems import listed
from matsmerge.progress import Progress
from matsmerge.recipes.recipe import Recipe, make_recipe
from matsmerge.recipes.rules import make_rules
from matsmerge.tasks.kinds import kind_of_model


def prepare_extraction(
    model: str,
    base: str,
    rank: int,
    modules: Sequence[str],
    keep_rest: bool,
    dtype: str | None,
    progress: Progress,
) -> PreparedMerge:
    """Compare a model with its base, and plan the LoRA; see `matsmerge.extract_lora`."""
    recipe = make_recipe(
        {
            "models": [{"model": model, "name": "model"}],
            "base": base,
            "method": "average",
            "output": "adapter",
            "rank": rank,
            "dtype": dtype,
        }
    )
    opened, start = _open_full(model), _open_full(base)
    alignment = align({"model": opened}, start, experts_apart=False)
    new = alignment.models[0].heads
    if new:
        start = _with_new(start, alignment, new)
        alignment = align({"model": opened}, start, experts_apart=False)
    changed = _changes(alignment, progress)
    own, outline = alignment.models[0], outline_of(opened)
    parameters = {n: outline.parameters.get(own.names[n], own.names[n]) for n in alignment.names}
    heads = [n for n, parameter in parameters.items() if is_head(parameter)]
    new = tuple(dict.fromkeys([*new, *(heads if changed.keys() & set(heads) else [])]))
    layers = {
        name: LoraLayer(
            parameters[name].removesuffix(".weight"),
            tuple(own.spec(name).shape),
            rank,
            recipe.torch_dtype or own.spec(name).dtype,
            outline.linear[own.names[name]],
        )
        for name in changed
        if own.names[name] in outline.linear and name not in new
    }
    if modules:
        known = [layer.module for layer in layers.values()]
        RecipeError.raise_all(
            f"no linear module that changed matches '{p}', e.g. {known[:1]}"
            for p in unmatched(modules, known)
        )
        layers = {n: layer for n, layer in layers.items() if matches(layer.module, modules)}
    if not layers:
        raise RecipeError(
            f"{model}: no linear layer differs from {base}; there is nothing to make a LoRA of"
        )
    rest = [n for n in changed if n not in layers and n not in new]
    tied = {n for n in rest if n in alignment.tied.values() or own.names[n] in outline.tied}
    kept = [n for n in rest if n not in tied] if keep_rest else []
    output = _output(recipe, limited(rank, layers), [*new, *kept], parameters, outline)
    rules = make_rules(recipe, alignment.names)
    plan = make_plan(alignment, rules, recipe.torch_dtype, output)
    left = {n: changed[n] for n in rest if n not in kept}
    companions = [p for p in companion_files(opened.folder) if p.name != "config.json"]
    inherited, card_notes = inherit_metadata({"the model": opened.folder})
    code = code_notes(companions, public_name(opened.label))
    notes = (*alignment.notes, *_left_out(left, tied), *code, *card_notes)
    return PreparedMerge(
        recipe, alignment, plan, (), output, tuple(companions), notes, inherited=inherited
    )


def _open_full(source: str) -> Checkpoint:
    checkpoint = open_checkpoint(source)
    if read_adapter(checkpoint) is not None:
        raise CheckpointError(
            f"{checkpoint.label}: is an adapter already; give full models (mats merge --output "
            "dense makes one)"
        )
    return checkpoint


def _with_new(base: Checkpoint, alignment: Alignment, new: Sequence[str]) -> Checkpoint:
    """The base with what only the model has, as if it had not changed."""
    model = alignment.models[0].checkpoint
    shared = alignment.base
    assert shared is not None
    # Under the model's names, which are those of the alignment.
    names = {name: shared.names[name] for name in alignment.names}
    specs = {n: base.specs[own] for n, own in names.items()} | {n: model.spec(n) for n in new}
    sources = {n: Stored(base, own) for n, own in names.items()}
    sources |= {n: Stored(model, model.aliases.get(n, n)) for n in new}
    return FilledCheckpoint(base.label, specs, sources, 0.0, of=base)


def _changes(alignment: Alignment, progress: Progress) -> dict[str, float]:
    """||a - b|| / ||b|| of every parameter that changed."""
    model, base = alignment.models[0], alignment.base
    assert base is not None
    progress.stage("comparing", sum(model.spec(n).num_bytes for n in alignment.names))
    found = {}
    for name in alignment.names:
        spec = model.spec(name)
        if spec.dtype.is_floating_point:
            found[name] = relative_change(
                partial(base.read, name), partial(model.read, name), spec.num_elements
            )
        progress.advance(spec.num_bytes)
    return {name: change for name, change in found.items() if change}


def _output(
    recipe: Recipe,
    layers: dict[str, LoraLayer],
    whole: Sequence[str],
    all_parameters: Mapping[str, str],
    outline: Outline,
) -> AdapterOutput:
    """The adapter with these layers, and what is brought `whole`."""
    modules = {layer.module for layer in layers.values()}
    parameters = {name: all_parameters[name] for name in whole}
    biases = [p for p in parameters.values() if p.endswith(".bias") and _is_linear(p, outline)]
    saved = {p.rpartition(".")[0] for p in parameters.values() if p not in biases}
    # A module is brought as a whole, with those of its parameters that did not change.
    parameters |= {n: p for n, p in all_parameters.items() if p.rpartition(".")[0] in saved}
    names = {name: tensor_name(p, modules) for name, p in parameters.items()}
    has_head = any(is_head(p) for p in parameters.values())
    kind = None if outline.config is None else kind_of_model(outline.config)
    lacks_head = kind is not None and kind.has_classes and not has_head
    content: dict[str, Any] = {
        "base_model_name_or_path": recipe.base,
        "revision": None,
        "task_type": None if kind is None or lacks_head else kind.peft_type,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "fan_in_fan_out": any(layer.is_transposed for layer in layers.values()),
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }
    config = lora_config(content, list(layers.values()), biases, saved)
    return AdapterOutput(config, layers, names)


def _is_linear(bias: str, outline: Outline) -> bool:
    """Is this the bias of a linear module? One of a norm is brought with it."""
    stored = {p: s for s, p in outline.parameters.items()}
    return stored.get(f"{bias.removesuffix('bias')}weight") in outline.linear


def _left_out(changes: Mapping[str, float], tied: Set[str]) -> list[str]:
    if not changes:
        return []
    order = sorted(changes, key=lambda name: -changes[name])
    shown = listed([f"{name} ({_relative(changes[name])})" for name in order], 6)
    ways = [
        *(["--keep-rest brings them whole"] if changes.keys() - tied else []),
        *([f"{', '.join(sorted(tied))}: used by several modules, no adapter can"] if tied else []),
    ]
    return [
        f"changed, but not in the LoRA, which has linear layers only ({len(order)} tensors; "
        f"relative change): {shown}; {'; '.join(ways)}"
    ]


def _relative(change: float) -> str:
    return f"{change:.1%}" if math.isfinite(change) else "from zero"
