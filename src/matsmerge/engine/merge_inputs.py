"""The models of a recipe as they enter the merge.

Full models enter as they are. Adapters enter in one of three ways:

    vectors   (IA)^3 alone: their vectors are merged; task vectors are taken from all ones
    folded    LoRA, or adapters beside full models: each as the full model it makes of its base
    joint     LoRA with `align` or `rank: concatenate`: changes, in a space they share
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from matsmerge.adapters.adapted_checkpoint import (
    AdaptedCheckpoint,
    check_ties,
    weights_of_another_base,
)
from matsmerge.adapters.adapter import PREFIX, Adapter
from matsmerge.adapters.adapter_folder import open_base, read_adapter
from matsmerge.adapters.joint_space import CoreSpace, JointCheckpoint, JointSpace
from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec
from matsmerge.checkpoints.filled_checkpoint import FilledCheckpoint, Stored
from matsmerge.checkpoints.source import Source, local_path, open_checkpoint, resolved
from matsmerge.errors import CheckpointError, RecipeError
from matsmerge.problems import noted
from matsmerge.recipes.recipe import Recipe
from matsmerge.tasks.kinds import names_in_base

AdapterView = Literal["full", "vectors", "folded", "joint"]


@dataclass(frozen=True)
class MergeInputs:
    """Checkpoints to merge, and what they were made from."""

    view: AdapterView
    models: Mapping[str, Checkpoint]
    base: Checkpoint | None  # what task vectors are taken from
    pretrained: Checkpoint | None = None  # the model that adapters are on, if it was needed
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    on_base: Mapping[str, AdaptedCheckpoint] = field(default_factory=dict)  # if there is one
    writes_adapter: bool = False
    space: JointSpace | None = None
    heads: tuple[str, ...] = ()  # what belongs to one adapter's task alone
    notes: tuple[str, ...] = ()


def gather_inputs(recipe: Recipe, sources: Mapping[str, Source]) -> MergeInputs:
    """Open all models and the base, and see what they are."""
    wanted = {str(entry.name): sources.get(str(entry.name), entry.model) for entry in recipe.models}
    if recipe.base is not None:
        wanted["base"] = sources.get("base", recipe.base)
    opened: dict[str, Checkpoint] = {}
    adapters: dict[str, Adapter] = {}
    problems: list[str] = []
    for name, source in wanted.items():
        with noted(problems, CheckpointError):
            label = None if isinstance(source, (str, Path)) else name
            opened[name] = open_input(source, label)
            adapter = read_adapter(opened[name])
            if adapter is not None:
                adapters[name] = adapter
    if "base" in adapters:
        problems.append(f"{opened['base'].label}: is an adapter; the base must be a full model")
    CheckpointError.raise_all(problems)
    base = opened.pop("base", None)
    view, writes_adapter = _choose_view(recipe, adapters)
    if view == "full":
        return MergeInputs(view, opened, base)
    heads = {n for a in adapters.values() for n in a.heads} if len(opened) > 1 else set()
    brings_values = any(_adds_to_biases(a) or a.values.keys() - heads for a in adapters.values())
    notes = _check_bases(adapters, base)
    if heads:
        notes.append(f"kept apart as each adapter's own head: {', '.join(sorted(heads))}")
    if base is None and (view == "folded" or not writes_adapter or brings_values):
        base = open_base(next(iter(adapters.values())))
    is_folded = view == "folded" and not writes_adapter
    on_base = {} if base is None else _put_on(base, adapters, is_folded=is_folded)
    inputs = MergeInputs(
        view, opened, base, base, adapters, on_base, writes_adapter, notes=tuple(notes)
    )
    if view == "vectors":
        return _as_vectors(inputs, heads)
    return _joint(inputs, heads, recipe.align) if view == "joint" else _folded(inputs)


class FoldedModel(AdaptedCheckpoint):
    """A model that an adapter is folded into, named together as `model+adapter`."""

    def __init__(self, label: str, model: Checkpoint, adapter: Adapter) -> None:
        super().__init__(model, adapter, names_in_base(adapter, model))
        self.label, self.folder = label, model.folder

    @property
    def origin(self) -> Checkpoint:
        return self  # neither of the two says alone what it is


def open_input(source: Source, label: str | None = None) -> Checkpoint:
    """Open a checkpoint, or a model with an adapter on it."""
    name, plus, added = source.partition("+") if isinstance(source, str) else ("", "", "")
    if not plus or local_path(str(source)).exists():
        return open_checkpoint(source, label)
    return fold_adapter(open_checkpoint(name), added, label or str(source))


def fold_adapter(model: Checkpoint, added: str, label: str) -> Checkpoint:
    """A model with an adapter folded in."""
    adapter = read_adapter(open_checkpoint(added))
    if adapter is None:
        raise CheckpointError(f"{label}: {added} is a full model; expected MODEL+ADAPTER")
    folded = FoldedModel(label, model, adapter)
    check_ties(folded)
    return folded


def _choose_view(recipe: Recipe, adapters: Mapping[str, Adapter]) -> tuple[AdapterView, bool]:
    """How to merge these models, if they can be merged as asked for; and whether as an adapter."""
    kinds = {adapter.kind for adapter in adapters.values()}
    all_of = kinds.pop() if len(kinds) == 1 and len(adapters) == len(recipe.models) else None
    problems = []
    if recipe.output == "adapter" and all_of is None:
        problems.append(
            "output: adapter needs adapters of one kind, LoRA or (IA)^3, and nothing else; write "
            "a full model, and make a LoRA of it with `mats extract-lora`"
        )
    if recipe.output == "dense" and recipe.rank is not None and recipe.align is None:
        problems.append("rank is that of a LoRA to write, and output is dense; leave out either")
    for key in ("rank", "align"):
        if getattr(recipe, key) is not None and not (all_of is not None and all_of.has_rank):
            problems.append(f"{key}: is for LoRA adapters; not all of these models are LoRAs")
    RecipeError.raise_all(problems)
    is_joint = recipe.align is not None or recipe.rank == "concatenate"
    uses_dora = any(adapter.config.uses_dora for adapter in adapters.values())
    if is_joint and uses_dora:
        raise RecipeError(
            "DoRA is not a change of low rank, so that it can be neither aligned nor concatenated; "
            "leave out align, or choose a number as rank"
        )
    if recipe.output == "adapter" and uses_dora and recipe.rank is None:
        raise RecipeError(
            "a DoRA is not a change of low rank; say how much of it to keep with rank, or "
            "write a full model"
        )
    is_lossy = uses_dora and recipe.rank is None
    writes_adapter = all_of is not None and recipe.output != "dense" and not is_lossy
    if not adapters:
        return "full", False
    if all_of is not None and not all_of.is_folded:
        return "vectors", writes_adapter
    return "joint" if is_joint else "folded", writes_adapter


def _check_bases(adapters: Mapping[str, Adapter], base: Checkpoint | None) -> list[str]:
    """Refuse adapters that say they are of different bases, unless the base was given."""
    named = {a.label: a.config.base for a in adapters.values() if a.config.base is not None}
    if base is None and len({resolved(name) for name in named.values()}) > 1:
        raise RecipeError(
            [
                "the adapters are of different bases; if these are the same model, say so with "
                "--base / base:",
                *(f"{label}: its base is {name}" for label, name in named.items()),
            ]
        )
    if base is None:
        return []
    given = {base.label, str(base.place), resolved(base.label)}
    others = sorted({name for name in named.values() if not {name, resolved(name)} & given})
    return [f"on the base {base.label}; the adapters name {', '.join(others)}"] if others else []


def _put_on(
    base: Checkpoint, adapters: Mapping[str, Adapter], *, is_folded: bool
) -> dict[str, AdaptedCheckpoint]:
    """All adapters on a base; refuses one that some adapter is not on, needed or not."""
    found: dict[str, AdaptedCheckpoint] = {}
    problems: list[str] = []
    for name, adapter in adapters.items():
        with noted(problems):
            one = found[name] = adapted(base, adapter)
            if is_folded:
                check_ties(one)
            elif others := weights_of_another_base(one):
                problems.append(
                    f"{one.label}: was trained with other values of {', '.join(others)} than "
                    f"{base.label} has (new tokens?), which no LoRA can say; write a full model "
                    "(--output dense, without align)"
                )
    CheckpointError.raise_all(problems)
    return found


def _adds_to_biases(adapter: Adapter) -> bool:
    """Does it add to biases, besides changing weights?"""
    return any("B.bias" in parts for parts in adapter.modules.values())


def _folded(inputs: MergeInputs) -> MergeInputs:
    base = inputs.base
    assert base is not None
    models = {**inputs.models, **inputs.on_base}
    heads = {
        n: Stored(folded, n)
        for folded in inputs.on_base.values()
        for n, own in folded.fitted.parameters.items()
        if own in folded.adapter.heads or (len(models) == 1 and n not in base.specs)
    }
    start = base
    if len(models) == 1 and heads:
        # A single adapter keeps its head; then the head did not start anywhere else.
        specs = {**base.specs, **{n: s.checkpoint.specs[n] for n, s in heads.items()}}
        sources = {n: Stored(base, n) for n in base.specs} | heads
        start, heads = FilledCheckpoint(base.label, specs, sources, 0.0, of=base), {}
    return replace(inputs, models=models, base=start, heads=tuple(heads))


def adapted(base: Checkpoint, adapter: Adapter) -> AdaptedCheckpoint:
    """An adapter on its base, whose names are asked for where the adapter has others."""
    return AdaptedCheckpoint(base, adapter, names_in_base(adapter, base))


def _as_vectors(inputs: MergeInputs, heads: set[str]) -> MergeInputs:
    adapters = list(inputs.adapters.values())
    vectors = {t: spec for a in reversed(adapters) for t, spec in _vectors(a).items()}
    names = {n: PREFIX + n for a in adapters for n in a.values}
    *values, (specs, sources) = _values(inputs, heads, names)
    models: dict[str, Checkpoint] = {}
    for (name, adapter), (own_specs, own_sources) in zip(
        inputs.adapters.items(), values, strict=True
    ):
        own = {t: Stored(adapter.checkpoint, t) for t in _vectors(adapter)} | own_sources
        all_specs = {**vectors, **_vectors(adapter), **own_specs}
        models[name] = FilledCheckpoint(adapter.label, all_specs, own, 1.0, of=adapter.checkpoint)
    start = FilledCheckpoint("the all-ones start", {**vectors, **specs}, sources, 1.0)
    return replace(inputs, models=models, base=start, heads=tuple(names[n] for n in heads))


def _vectors(adapter: Adapter) -> dict[str, TensorSpec]:
    specs = adapter.checkpoint.specs
    return {t: specs[t] for parts in adapter.modules.values() for t in parts.values()}


def _joint(inputs: MergeInputs, heads: set[str], align: str | None) -> MergeInputs:
    kind = CoreSpace if align == "core_space" else JointSpace
    space = kind(list(inputs.adapters.values()))
    weights = {f"{module}.weight" for module in space.modules}
    RecipeError.raise_all(
        f"{a.label}: brings '{n}' whole, which another adapter changes by LoRA; such changes can "
        "be neither aligned nor concatenated. Leave out align, or choose a number as rank"
        for a in inputs.adapters.values()
        for n in a.own_values
        if n in weights
    )
    names = {n: n for a in inputs.adapters.values() for n in a.values}
    *values, (specs, sources) = _values(inputs, heads, names)
    models = {
        name: JointCheckpoint(space, i, FilledCheckpoint("", *own, 0.0))
        for i, (name, own) in enumerate(zip(inputs.adapters, values, strict=True))
    }
    coordinates = {f"{m}.weight": space.spec(m) for m in space.modules}
    start = FilledCheckpoint("no change", {**coordinates, **specs}, sources, 0.0)
    return replace(inputs, models=models, base=start, heads=tuple(sorted(heads)), space=space)


def _values(
    inputs: MergeInputs, heads: set[str], names: Mapping[str, str]
) -> Iterator[tuple[dict[str, TensorSpec], dict[str, Stored]]]:
    """Parameters that each adapter brings whole, and last those of the base, which others share.

    Each has a spec and a source, under the name it is merged by; what one lacks is the base's.
    """
    on_base = inputs.on_base
    brought = {n: _brought(adapter, on_base.get(n)) for n, adapter in inputs.adapters.items()}
    shared: dict[str, Stored] = {}
    for own in reversed(brought.values()):
        shared |= {n: source for n, source in own.items() if n not in heads}
    of_base = dict(shared)  # what nobody else has, such as the head of a single adapter
    for name, folded in on_base.items():
        in_base = _names_of_values(folded)
        of_base |= {
            n: Stored(folded.base, in_base[n])
            for n in brought[name]
            if n in shared and in_base[n] in folded.base.specs
        }
    names = {**{n: n for n in shared}, **names}
    for own in brought.values():
        sources = {**of_base, **own}
        yield _specs(sources, names), {names[n]: s for n, s in sources.items()}
    yield _specs(shared, names), {names[n]: s for n, s in of_base.items()}


def _specs(sources: Mapping[str, Stored], names: Mapping[str, str]) -> dict[str, TensorSpec]:
    return {names[n]: source.checkpoint.specs[source.name] for n, source in sources.items()}


def _brought(adapter: Adapter, folded: AdaptedCheckpoint | None) -> dict[str, Stored]:
    """Parameters with the values an adapter gives them; a bias it adds to is one of them."""
    found = {n: Stored(adapter.checkpoint, t) for n, t in adapter.own_values.items()}
    if folded is not None:
        for weight, module in folded.fitted.modules.items():
            if "B.bias" in adapter.modules[module]:
                found[f"{module}.bias"] = Stored(folded, f"{weight.removesuffix('weight')}bias")
    return found


def _names_of_values(folded: AdaptedCheckpoint) -> dict[str, str]:
    """What the base calls parameters that an adapter brings, and biases it adds to."""
    names = {own: n for n, own in folded.fitted.parameters.items()}
    for weight, module in folded.fitted.modules.items():
        names.setdefault(f"{module}.bias", f"{weight.removesuffix('weight')}bias")
    return names
