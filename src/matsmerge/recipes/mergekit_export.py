"""Recipes as mergekit's YAML, where it can say the same."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from matsmerge.recipes.mergekit_methods import MERGEKIT_METHODS, find_method, our_name
from matsmerge.recipes.recipe import FP8, WIDEST, Recipe
from matsmerge.recipes.recipe_parts import ModelEntry, Override
from matsmerge.recipes.stack import BASE, OtherBase

_HELD = re.compile(r"\*([^*?\[\]]+)\*")
# What mergekit has no word for.
_UNSAID = ("heads", "match_heads", "trajectory", "output", "rank", "align", "ignore_tokenizers")


def to_mergekit(recipe: Recipe, rename: Mapping[str, str]) -> dict[str, Any] | None:
    """The same merge for mergekit, as plain data, or None if it cannot be said there.

    `rename` has what models are called there, by what the recipe calls them.
    """
    name = "linear" if recipe.method.name == "average" else recipe.method.name
    if name not in MERGEKIT_METHODS or any(getattr(recipe, key) for key in _UNSAID):
        return None
    if recipe.dtype == FP8:
        return None
    if any(entry.statistics or entry.data for entry in recipe.models) or len(recipe.stack) > 1:
        return None
    if any(not _is_filter(override) for override in recipe.overrides):
        return None
    shared = _shared(recipe, name)
    if shared is None:
        return None
    known = MERGEKIT_METHODS[name]
    models = [_entry(recipe, entry, known.own, rename) for entry in recipe.models]
    if name == "slerp":
        on_arc = _on_arc(recipe)
        if on_arc is None:
            return None
        shared |= {"t": on_arc}
    base = recipe.base if name != "slerp" else recipe.models[0].model
    found: dict[str, Any] = {"merge_method": name}
    if base is not None:
        found["base_model"] = rename.get(base, base)
    if recipe.stack:
        by_name = {str(e.name): m for e, m in zip(recipe.models, models, strict=True)}
        slices = [_slice(ranges, by_name, found) for ranges in recipe.stack[0].layers]
        if recipe.stack[0].match != ["*"]:
            return None
        found["slices"] = slices
    else:
        found["models"] = models
    if shared:
        found["parameters"] = shared
    for key in ("name", "dtype", "chat_template", "tokenizer"):
        value = recipe.model_dump(mode="json").get(key)
        if value not in (None, WIDEST):  # which is its default
            found[key] = value
    return found


def _is_filter(override: Override) -> bool:
    """Whether an override is for names that hold a text, and changes numbers alone."""
    is_held = all(_HELD.fullmatch(pattern) for pattern in override.match)
    changes_name = "name" in (override.method or {})
    is_plain = override.layers is None and override.only is None and not changes_name
    return is_held and is_plain and len(override.match) == 1


def _shared(recipe: Recipe, name: str) -> dict[str, Any] | None:
    """The parameters of the method that differ from mergekit's defaults; None if it lacks one."""
    known, ours = find_method(name)
    names = {our_name(ours, key): key for key in (*known.shared, *known.own)}
    options = {k: v for k, v in recipe.method.at_depth(0).model_dump().items() if k != "name"}
    options |= recipe.method.parameters
    if name == "ties" and options.pop("trim", None) != "parameter":
        return None
    found = {}
    for key, value in options.items():
        theirs = names.get(key)
        if theirs is None and key not in ("task_vectors", "seed", "model"):
            return None
        default = known.shared.get(str(theirs), known.own.get(str(theirs)))
        filters = [
            {"filter": _text(o), "value": o.method[key]}
            for o in reversed(recipe.overrides)
            if o.method and key in o.method
        ]
        if theirs is not None and (value != default or filters):
            found[theirs] = [*filters, {"value": value}] if filters else value
    return found


def _text(override: Override) -> str:
    return override.match[0].strip("*")


def _entry(
    recipe: Recipe, entry: ModelEntry, own: Mapping[str, Any], rename: Mapping[str, str]
) -> dict[str, Any]:
    parameters = {}
    for key in own:
        value = getattr(entry, key, None)
        filters = [
            {"filter": _text(o), "value": getattr(o.models[str(entry.name)], key)}
            for o in reversed(recipe.overrides)
            if getattr(o.models.get(str(entry.name)), key, None) is not None
        ]
        if filters:  # where none holds and the model has no value, the method's counts
            parameters[key] = [*filters, *([] if value is None else [{"value": value}])]
        elif value is not None:
            parameters[key] = value
    found: dict[str, Any] = {"model": rename.get(entry.model, entry.model)}
    return found | ({"parameters": parameters} if parameters else {})


def _on_arc(recipe: Recipe) -> Any:
    """The t of slerp for the weights of two models, which here must be 1 - t and t."""

    def t_of(first: Any, second: Any) -> Any:
        if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
            found = [t_of(a, b) for a, b in zip(first, second, strict=True)]
            return None if None in found else found
        are_numbers = all(isinstance(w, (int, float)) for w in (first, second))
        return second if are_numbers and abs(first + second - 1) < 1e-6 else None

    names = [str(entry.name) for entry in recipe.models]
    pairs: list[tuple[str | None, Any]] = [
        (_text(o), t_of(*(o.models[name].weight for name in names)))
        for o in reversed(recipe.overrides)
        if o.models.keys() == set(names)
    ]
    pairs.append((None, t_of(*(entry.weight for entry in recipe.models))))
    if len(pairs) <= len(recipe.overrides) or any(t is None for _, t in pairs):
        return None
    if len(pairs) == 1:
        return pairs[0][1]
    return [{**({"filter": text} if text else {}), "value": t} for text, t in pairs]


def _slice(
    ranges: Mapping[str, Any], models: Mapping[str, Any], whole: Mapping[str, Any]
) -> dict[str, Any]:
    sources: list[dict[str, Any]] = []
    found: dict[str, Any] = {"sources": sources}
    for name, given in ranges.items():
        if isinstance(given, OtherBase):
            found["base_model"] = models[given.model]["model"]
            sources.append({"model": found["base_model"], "layer_range": list(given.layers)})
        elif name == BASE:
            sources.append({"model": whole["base_model"], "layer_range": list(given)})
        else:
            sources.append({**models[name], "layer_range": list(given)})
    _add_base(sources, ranges, whole)
    return found


def _add_base(
    sources: list[dict[str, Any]], ranges: Mapping[str, Any], whole: Mapping[str, Any]
) -> None:
    """List the base where a stack takes the same layers of it, as mergekit wants it."""
    base = whole.get("base_model")
    needs_it = MERGEKIT_METHODS[whole["merge_method"]].base == "required"
    listed: Sequence[Any] = [source["model"] for source in sources]
    if needs_it and BASE not in ranges and base is not None and base not in listed:
        sources.append({"model": base, "layer_range": sources[0]["layer_range"]})
