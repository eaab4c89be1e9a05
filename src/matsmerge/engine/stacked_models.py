"""Models under the layer numbers that a stack gives them.

A stack is merged as models are that have its layers: each model enters as a view in which a layer
of the result is the layer that it is made of. A model that takes no part in a parameter has, in
its view, that of one which does; it is never read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from matsmerge.checkpoints.alignment import matches
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.companions import read_object
from matsmerge.checkpoints.filled_checkpoint import FilledCheckpoint, Stored
from matsmerge.engine.layer_settings import restack
from matsmerge.engine.merge_inputs import MergeInputs
from matsmerge.errors import RecipeError
from matsmerge.problems import listed, noted
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.rules import find_places, make_rules
from matsmerge.recipes.stack import BASE, Stack


@dataclass(frozen=True)
class Layered:
    """A checkpoint's tensors by layers: `layers[stack][layer][rest of the name]` is its name."""

    checkpoint: Checkpoint
    layers: Mapping[str, Mapping[int, Mapping[str, str]]]
    outside: tuple[str, ...]  # what is in no layer


@dataclass(frozen=True)
class Stacked:
    """Inputs as views, who takes part in what, and the stacks by what their names begin with."""

    inputs: MergeInputs
    taking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # parameter -> models
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    originals: Mapping[str, Layered] = field(default_factory=dict)

    def config_changes(self, like: Checkpoint | None) -> dict[str, Any]:
        """What of the configuration of the checkpoint that gives its files is to be changed."""
        if not self.stacks or like is None or like.place is None:
            return {}  # in memory, or not made yet: there is nothing to change
        configs = {name: _config(one.checkpoint) for name, one in self.originals.items()}
        config = _config(like)
        own = _by_layers(like)
        changes: dict[str, Any] = {}
        for prefix, stack in self.stacks.items():
            sources = []
            for i in range(len(stack.layers)):
                name, start = next(iter(stack.starts_at(i).items()))
                sources += [(configs[name], start + k) for k in range(len(range(*stack.span(i))))]
            if config:
                restack(config, prefix, len(own.layers.get(prefix, ())), sources, changes)
        return changes


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.folder and checkpoint.folder / "config.json"
    return read_object(path) if path and path.is_file() else {}


def stack_models(recipe: Recipe, inputs: MergeInputs) -> Stacked:
    """Put the models of a recipe into its stacks; every problem at once, from headers alone."""
    if not recipe.stack:
        return Stacked(inputs)
    RecipeError.raise_all(_refusals(recipe, inputs))
    opened = {n: _by_layers(c) for n, c in inputs.models.items()}
    if inputs.base is not None:
        opened[BASE] = _by_layers(inputs.base)
    problems: list[str] = []
    stacks = dict(_find_stacks(recipe.stack, opened, problems))
    for prefix, stack in stacks.items():
        problems += _misfits(prefix, stack, opened)
    RecipeError.raise_all(problems)

    names = {m: {n: n for n in one.checkpoint.specs} for m, one in opened.items()}
    taking: dict[str, tuple[str, ...]] = {}
    for prefix, stack in stacks.items():
        for table in names.values():  # layers get their new numbers below
            for n in [n for n, p in find_places(table).items() if p.stack == prefix]:
                del table[n]
        at_ends = {*stack.models_at(0), *stack.models_at(len(stack.layers) - 1), BASE}
        for model in opened.keys() - at_ends:  # what is in no layer is not taken from it
            for n in opened[model].outside:
                if matches(n, stack.match):
                    del names[model][n]
        for out, index, own in _outputs(prefix, stack, opened):
            taking[out] = stack.models_at(index)
            for model in opened:
                names[model].pop(out, None)
                if model in own:
                    names[model][out] = own[model]
    base = _base_sources(recipe, stacks, opened, taking, problems)
    RecipeError.raise_all(problems)
    views: dict[str, Checkpoint] = {}
    for model, one in opened.items():
        sources = {out: Stored(one.checkpoint, own) for out, own in names[model].items()}
        for out, models in taking.items():
            if model == BASE and out in base:
                sources[out] = base[out]
            elif model not in models:
                sources.pop(out, None)
                first = next((m for m in models if out in names[m]), None)
                if first is not None:
                    sources[out] = Stored(opened[first].checkpoint, names[first][out])
        specs = {n: s.checkpoint.specs[s.name] for n, s in sources.items()}
        views[model] = FilledCheckpoint(one.checkpoint.label, specs, sources, of=one.checkpoint)
    start = views.pop(BASE, None)
    return Stacked(replace(inputs, models=views, base=start), taking, stacks, opened)


def _refusals(recipe: Recipe, inputs: MergeInputs) -> Iterator[str]:
    if inputs.view != "full":
        yield (
            "stack: is for full models, and some are adapters; name an adapter with its model, as "
            "MODEL+ADAPTER, and it is folded into it"
        )
    for where, spec in recipe.method_specs():
        method = spec.at_depth(0)
        if method.needed_statistics or method.uses_merged_inputs:
            yield (
                f"{where}method {spec.name} uses statistics, which are of the models' own layers; "
                "a stack cannot be merged by it. Merge the models first, in a document of its own "
                "with a name, and stack the results"
            )
    if recipe.heads:
        yield "heads: cannot be kept apart from a stack; leave them out"


def _by_layers(checkpoint: Checkpoint) -> Layered:
    layers: dict[str, dict[int, dict[str, str]]] = {}
    outside = []
    for name, place in find_places(checkpoint.specs).items():
        if place.layer is None:
            outside.append(name)
        else:
            layers.setdefault(place.stack, {}).setdefault(place.layer, {})[place.rest] = name
    return Layered(checkpoint, layers, tuple(outside))


def _find_stacks(
    stacks: Sequence[Stack], opened: Mapping[str, Layered], problems: list[str]
) -> Iterator[tuple[str, Stack]]:
    """The stack of layers, in the names of the first model of each, that a stack is for."""
    taken: dict[str, Stack] = {}
    for stack in stacks:
        like = opened[stack.models_at(0)[0]]
        found = [
            prefix
            for prefix, layers in like.layers.items()
            if any(matches(n, stack.match) for layer in layers.values() for n in layer.values())
        ]
        if len(found) != 1:
            what = f"several stacks of layers, {listed(found)}" if found else "no layers"
            problems.append(
                f"stack {stack.match}: {like.checkpoint.label} has {what}, where one is expected; "
                "say which with match: PATTERN"
            )
        elif found[0] in taken:
            problems.append(f"stack {stack.match}: {found[0]} is stacked twice; stacks overlap")
        else:
            taken[found[0]] = stack
            yield found[0], stack


def _misfits(prefix: str, stack: Stack, opened: Mapping[str, Layered]) -> Iterator[str]:
    """Ranges outside of models, and models whose layers have other shapes."""
    for i, ranges in enumerate(stack.layers):
        length = len(range(*stack.span(i)))
        starts = stack.starts_at(i)
        given = stack.base_at(i) if BASE in ranges else None
        if given is not None:
            starts[given[0]] = given[1]
        for name, start in starts.items():
            if name not in opened:
                yield f"stack: layers.{i} has layers of a base, and there is none (base:)"
                continue
            num = max(opened[name].layers.get(prefix, ()), default=-1) + 1
            if start + length > num:
                yield (
                    f"stack: layers.{i} takes the layers {[start, start + length]} of "
                    f"{opened[name].checkpoint.label}, which has {num} ({prefix})"
                )
    first, *others = dict.fromkeys(m for i in range(len(stack.layers)) for m in stack.models_at(i))
    expected = _shapes(opened[first], prefix)
    for other in others:
        found = _shapes(opened[other], prefix)
        wrong = [
            f"{rest.lstrip('.')} {list(min(found[rest]))} instead of {list(min(shapes))}"
            for rest, shapes in expected.items()
            if rest in found and not shapes & found[rest]
        ]
        if wrong:
            yield (
                f"stack: the layers of {opened[other].checkpoint.label} are of another width than "
                f"those of {opened[first].checkpoint.label}: {listed(wrong)}"
            )


def _shapes(model: Layered, prefix: str) -> dict[str, set[tuple[int, ...]]]:
    found: dict[str, set[tuple[int, ...]]] = {}
    for layer in model.layers.get(prefix, {}).values():
        for rest, name in layer.items():
            found.setdefault(rest, set()).add(model.checkpoint.specs[name].shape)
    return found


def _outputs(
    prefix: str, stack: Stack, opened: Mapping[str, Layered]
) -> Iterator[tuple[str, int, dict[str, str]]]:
    """Each parameter of a stack, the range it is in, and what each model calls it."""
    first, last = 0, len(stack.layers) - 1
    outside = opened[stack.models_at(first)[0]].outside
    places = find_places(outside)
    for name in outside:
        if matches(name, stack.match):
            index = first if places[name].is_before else last
            taking = stack.models_at(index)
            yield name, index, {m: name for m in taking if name in opened[m].checkpoint.specs}
    dot = "." if prefix else ""
    for i in range(len(stack.layers)):
        begin, end = stack.span(i)
        for k in range(end - begin):
            own = {  # a layer may have no parameters
                m: opened[m].layers[prefix].get(start + k, {})
                for m, start in stack.starts_at(i).items()
            }
            for rest in dict.fromkeys(rest for layer in own.values() for rest in layer):
                names = {m: layer[rest] for m, layer in own.items() if rest in layer}
                yield f"{prefix}{dot}{begin + k}{rest}", i, names


def _base_sources(
    recipe: Recipe,
    stacks: Mapping[str, Stack],
    opened: Mapping[str, Layered],
    taking: Mapping[str, tuple[str, ...]],
    problems: list[str],
) -> dict[str, Stored]:
    """The base's values of all parameters whose methods read them."""
    rules = {}
    with noted(problems, RecipeError):
        rules = make_rules(recipe, list(taking), taking)
    reading = [n for n, r in rules.items() if r.method.reads_base or r.method.only_model == BASE]
    found: dict[str, Stored] = {}
    lacking: dict[str, list[str]] = {}
    if not reading or BASE not in opened:
        return found
    for prefix, stack in stacks.items():
        for i in range(len(stack.layers)):
            span, base = stack.span(i), stack.base_at(i)
            own = {
                n: p
                for n, p in find_places(reading).items()
                if (p.stack == prefix and p.layer in range(*span))
                or (p.layer is None and i == (0 if p.is_before else len(stack.layers) - 1))
            }
            if own and base is None:
                problems.append(
                    f"stack: layers.{i} merges different layers, so it must say which of the base "
                    "belong to them, as in base: [0, 8]"
                )
                continue
            for name, place in own.items():
                assert base is not None
                of, start = base
                source: str | None = name
                if place.layer is not None:
                    layers = opened[of].layers.get(prefix, {})
                    layer = layers.get(start + place.layer - span[0], {})
                    source = layer.get(place.rest)
                checkpoint = opened[of].checkpoint
                tensor = checkpoint.aliases.get(str(source), source)
                if tensor in checkpoint.specs:
                    found[name] = Stored(checkpoint, str(tensor))
                else:
                    lacking.setdefault(checkpoint.label, []).append(name)
    problems += [
        f"stack: the base {label} has nothing for {listed(names)}; say which of its layers belong "
        "to them, as in base: [0, 8]"
        for label, names in lacking.items()
    ]
    return found
