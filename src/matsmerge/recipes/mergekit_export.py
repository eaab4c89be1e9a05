"""Recipes as mergekit's YAML, where it can say the same."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matsmerge.recipes.mergekit_methods import MERGEKIT_METHODS, find_method, our_name
from matsmerge.recipes.recipe import FP8, WIDEST, Recipe
from matsmerge.recipes.recipe_parts import ModelEntry, ModelOverride, Override
from matsmerge.recipes.stack import BASE, OtherBase

_HELD = re.compile(r"\*([^*?\[\]]+)\*")
# What mergekit has no word for.
_UNSAID = ("heads", "match_heads", "trajectory", "output", "rank", "align", "ignore_tokenizers")
# Options of ours that its methods have not, and that say what they do anyway.
_ALIKE = ("name", "task_vectors", "seed", "model")


class _UnsaidError(Exception):
    """mergekit cannot say it."""


def to_mergekit(recipe: Recipe, rename: Mapping[str, str]) -> dict[str, Any] | None:
    """The same merge for mergekit, as plain data, or None if it cannot be said there.

    `rename` has what models are called there, by what the recipe calls them.
    """
    try:
        return _translated(recipe, rename)
    except _UnsaidError:
        return None


def _translated(recipe: Recipe, rename: Mapping[str, str]) -> dict[str, Any]:
    name = "linear" if recipe.method.name == "average" else recipe.method.name
    _refuse_if(name not in MERGEKIT_METHODS or recipe.dtype == FP8)
    _refuse_if(any(getattr(recipe, key) for key in _UNSAID))
    _refuse_if(any(entry.statistics or entry.data for entry in recipe.models))
    _refuse_if(not all(_is_filter(override, recipe) for override in recipe.overrides))
    whole, of_slices = _split(recipe)
    shared = _shared(recipe, name, whole)
    base = recipe.base if name != "slerp" else recipe.models[0].model
    found: dict[str, Any] = {"merge_method": name}
    if base is not None:
        found["base_model"] = rename.get(base, base)
    if recipe.stack:
        found["slices"] = [_slice(recipe, i, own, found, rename) for i, own in enumerate(of_slices)]
    else:
        found["models"] = [_source(entry, name, whole, rename) for entry in recipe.models]
    has_own = bool(of_slices) and all(any(o.match == ["*"] for o in own) for own in of_slices)
    if name == "slerp" and not has_own:
        first, second = (entry.weight for entry in recipe.models)
        shared["t"] = _conditions(whole, _point_at(recipe), _point(first, second))
    if shared:
        found["parameters"] = shared
    for key in ("name", "dtype", "chat_template", "tokenizer"):
        value = recipe.model_dump(mode="json").get(key)
        if value not in (None, WIDEST):  # which is its default
            found[key] = value
    if found.get("dtype") in ("float16", "bfloat16"):
        # It rounds models to its dtype before it merges them, we round the result alone.
        found |= {"dtype": "float32", "out_dtype": found["dtype"]}
    return found


def _refuse_if(is_unsaid: bool) -> None:
    if is_unsaid:
        raise _UnsaidError


def _is_filter(override: Override, recipe: Recipe) -> bool:
    """Whether an override is for names that hold a text, and changes numbers alone."""
    is_held = override.match == ["*"] or (
        len(override.match) == 1 and _HELD.fullmatch(override.match[0]) is not None
    )
    keeps_method = (override.method or {}).get("name", recipe.method.name) == recipe.method.name
    return is_held and keeps_method and override.only is None


def _split(recipe: Recipe) -> tuple[list[Override], list[list[Override]]]:
    """Overrides for all layers, and those of each range of a stack.

    mergekit's first slice says what holds before all layers as well, its last what does after.
    """
    whole = [override for override in recipe.overrides if override.layers is None]
    layered = [override for override in recipe.overrides if override.layers is not None]
    if not recipe.stack:
        _refuse_if(bool(layered))
        return whole, []
    (stack, *others) = recipe.stack
    _refuse_if(bool(others) or stack.match != ["*"] or bool(layered and whole))
    spans = [stack.span(i) for i in range(len(stack.layers))]
    # Numbers over depth go over a slice there, and here over all layers.
    _refuse_if(len(spans) > 1 and _has_lists(recipe, whole))
    places = (*spans, "before", "after")
    own = {place: [o for o in layered if o.layers == place] for place in places}
    _refuse_if(sum(map(len, own.values())) < len(layered))
    for place, span in (("before", spans[0]), ("after", spans[-1])):
        _refuse_if([_content(o) for o in own[place]] != [_content(o) for o in own[span]])
    return whole, [own[span] for span in spans]


def _content(override: Override) -> tuple[Any, ...]:
    return override.match, override.method, override.models


def _has_lists(recipe: Recipe, overrides: Sequence[Override]) -> bool:
    """Whether numbers that are for all layers go over them."""
    parts = [entry.model_dump(exclude={"data", "statistics"}) for entry in recipe.models]
    parts += [dict(recipe.method.parameters), *(o.method or {} for o in overrides)]
    parts += [change.model_dump() for o in overrides for change in o.models.values()]
    return any(isinstance(value, list) for part in parts for value in part.values())


def _shared(recipe: Recipe, name: str, whole: Sequence[Override]) -> dict[str, Any]:
    """The parameters of the method that differ from mergekit's defaults."""
    known = MERGEKIT_METHODS[name]
    options = _options(recipe)
    _refuse_if(name == "ties" and options.pop("trim") != "parameter")
    found = {}
    for key, theirs in _names(name, options).items():
        default = known.shared.get(theirs, known.own.get(theirs))
        value = _conditions(whole, _option_at(key), options[key])
        if value != default:
            found[theirs] = value
    return found


def _options(recipe: Recipe) -> dict[str, Any]:
    return recipe.method.at_depth(0).model_dump() | recipe.method.parameters


def _names(name: str, options: Iterable[str]) -> dict[str, str]:
    """What mergekit calls options of a method."""
    known, ours = find_method(name)
    there = {our_name(ours, key): key for key in (*known.shared, *known.own)}
    kept = [key for key in options if key not in _ALIKE]
    _refuse_if(any(key not in there for key in kept))
    return {key: there[key] for key in kept}


def _conditions(
    overrides: Sequence[Override], value_at: Callable[[Override], Any], otherwise: Any = None
) -> Any:
    """A setting of mergekit's, of which the first condition that holds decides; None for none."""
    found = []
    for override in reversed(overrides):
        value = value_at(override)
        if value is not None:
            text = override.match[0].strip("*")
            found.append({"filter": text, "value": value} if text else {"value": value})
            if not text:
                break
    else:
        found += [] if otherwise is None else [{"value": otherwise}]
    return found[0]["value"] if found and "filter" not in found[0] else found or None


def _option_at(key: str) -> Callable[[Override], Any]:
    return lambda override: (override.method or {}).get(key)


def _source(
    entry: ModelEntry, name: str, overrides: Sequence[Override], rename: Mapping[str, str]
) -> dict[str, Any]:
    parameters = {}
    for key in MERGEKIT_METHODS[name].own:
        if key in ModelOverride.model_fields:  # the others are the method's, for all models

            def value_at(override: Override, key: str = key) -> Any:
                return getattr(override.models.get(str(entry.name)), key, None)

            # Where none holds and the model has no value, the method's counts.
            parameters[key] = _conditions(overrides, value_at, getattr(entry, key))
    parameters = {key: value for key, value in parameters.items() if value is not None}
    found: dict[str, Any] = {"model": rename.get(entry.model, entry.model)}
    return found | ({"parameters": parameters} if parameters else {})


def _point_at(recipe: Recipe) -> Callable[[Override], Any]:
    """The t of slerp that an override's weights stand for."""

    def point_at(override: Override) -> Any:
        weights = [override.models.get(str(entry.name)) for entry in recipe.models]
        first, second = (None if given is None else given.weight for given in weights)
        return _point(first, second)

    return point_at


def _point(first: Any, second: Any) -> Any:
    """The t of slerp for the weights of two models, which here must be 1 - t and t."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [_point(a, b) for a, b in zip(first, second, strict=True)]
    are_numbers = all(isinstance(weight, (int, float)) for weight in (first, second))
    _refuse_if(not are_numbers or abs(first + second - 1) >= 1e-6)
    return second


def _slice(
    recipe: Recipe,
    index: int,
    overrides: Sequence[Override],
    whole: Mapping[str, Any],
    rename: Mapping[str, str],
) -> dict[str, Any]:
    name, options = str(whole["merge_method"]), _options(recipe)
    entries = {str(entry.name): entry for entry in recipe.models}
    sources: list[dict[str, Any]] = []
    found: dict[str, Any] = {"sources": sources}
    ranges = recipe.stack[0].layers[index]
    for model, given in ranges.items():
        if isinstance(given, OtherBase):
            other = entries[given.model].model
            found["base_model"] = rename.get(other, other)
            sources.append({"model": found["base_model"], "layer_range": list(given.layers)})
        elif model == BASE:
            sources.append({"model": whole["base_model"], "layer_range": list(given)})
        else:
            source = _source(entries[model], name, overrides, rename)
            sources.append({**source, "layer_range": list(given)})
    _add_base(sources, ranges, whole)
    parameters = {}
    for override in overrides:
        given_options = {**(override.method or {})}
        _refuse_if(given_options.pop("trim", "parameter") != "parameter")
        _refuse_if(any(given_options.get(k, options.get(k)) != options.get(k) for k in _ALIKE[1:]))
        for key, theirs in _names(name, given_options).items():
            value = _conditions(overrides, _option_at(key))
            if value != options[key]:
                parameters[theirs] = value
    if name == "slerp":
        parameters["t"] = _conditions(overrides, _point_at(recipe))
    parameters = {key: value for key, value in parameters.items() if value is not None}
    return found | ({"parameters": parameters} if parameters else {})


def _add_base(
    sources: list[dict[str, Any]], ranges: Mapping[str, Any], whole: Mapping[str, Any]
) -> None:
    """List the base where a stack takes the same layers of it, as mergekit wants it."""
    base = whole.get("base_model")
    needs_it = MERGEKIT_METHODS[whole["merge_method"]].base != "ignored"
    listed: Sequence[Any] = [source["model"] for source in sources]
    if needs_it and BASE not in ranges and base is not None and base not in listed:
        sources.append({"model": base, "layer_range": [*sources[0]["layer_range"]]})
