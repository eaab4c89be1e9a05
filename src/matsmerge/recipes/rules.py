"""Rules: the method, weights and densities that a recipe gives each parameter."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from matsmerge.checkpoints.alignment import matches, unmatched
from matsmerge.errors import RecipeError
from matsmerge.methods.method import Method
from matsmerge.methods.options import at_depth
from matsmerge.methods.site import Shares
from matsmerge.problems import problems_of
from matsmerge.recipes.recipe import SHARES, Recipe

_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True)
class Rule:
    """A method with all its numbers, and each model's weight and shares."""

    method: Method
    weights: tuple[float, ...]
    shares: tuple[Shares, ...]


def check_patterns(recipe: Recipe, names: Sequence[str]) -> None:
    """Refuse an override that would never apply."""
    RecipeError.raise_all(
        f"the override pattern '{pattern}' matches no parameter, e.g. {names[0]}"
        for override in recipe.overrides
        for pattern in unmatched(override.match, names)
    )


def make_rules(recipe: Recipe, names: Sequence[str]) -> dict[str, Rule]:
    """The rule for every parameter; parameters treated alike share one rule."""
    depths = layer_depths(names)
    rules: dict[tuple[Any, ...], Rule] = {}
    result: dict[str, Rule] = {}
    for name in names:
        applying = tuple(i for i, o in enumerate(recipe.overrides) if matches(name, o.match))
        key = applying, depths[name]
        if key not in rules:
            rules[key] = _make_rule(recipe, applying, depths[name], name)
        result[name] = rules[key]
    return result


def _make_rule(recipe: Recipe, applying: Iterable[int], depth: float, name: str) -> Rule:
    current = recipe
    weights: dict[Any, Any] = {entry.name: entry.weight for entry in recipe.models}
    own: dict[Any, dict[str, Any]] = {
        entry.name: {key: getattr(entry, key) for key in SHARES} for entry in recipe.models
    }
    where = name
    try:
        for override in (recipe.overrides[i] for i in applying):
            where = f"{name}: override {override.match}"
            if override.method is not None:
                spec = current.overridden(override)
                current = current.model_copy(update={"method": spec})
            for model, change in override.models.items():
                if change.weight is not None:
                    weights[model] = change.weight
                own[model] |= _given({key: getattr(change, key) for key in SHARES})
        where = name
        method = current.method.at_depth(depth)
    except ValidationError as error:
        raise RecipeError([f"{where}: {problem}" for problem in problems_of(error)]) from error
    defaults = {key: method.own_share(key) for key in SHARES}
    rule = Rule(
        method,
        tuple(float(at_depth(w, depth)) for w in weights.values()),
        tuple(_shares({**defaults, **_given(of_model)}, depth) for of_model in own.values()),
    )
    if method.divides_by_weights and sum(rule.weights) == 0:
        raise RecipeError(
            f"{name}: the models' weights {list(rule.weights)} sum to zero, and "
            f"{current.method.name} divides by their sum"
        )
    if method.weights_covariances and min(rule.weights) < 0:
        raise RecipeError(
            f"{name}: the models' weights {list(rule.weights)} must not be negative: "
            f"{current.method.name} weighs covariances with them"
        )
    densities = [shares.density for shares in rule.shares]
    if not all(0 < d <= 1 for d in densities):
        raise RecipeError(f"{name}: the densities {densities} must be above 0 and at most 1")
    found = [method.share_problem(shares) for shares in rule.shares]
    RecipeError.raise_all(f"{name}: {problem}" for problem in dict.fromkeys(found) if problem)
    return rule


def _shares(given: Mapping[str, Any], depth: float) -> Shares:
    return Shares(**{key: float(at_depth(value, depth)) for key, value in _given(given).items()})


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def layer_depths(names: Sequence[str]) -> Mapping[str, float]:
    """How deep in the network each parameter is, from 0 to 1, by the first number in its name.

    Layers are counted for each stack by itself (`encoder.block.3`, `decoder.block.3`). What is in
    no layer has depth 0; the only layer of a stack has depth 1.
    """
    layers: dict[str, tuple[str, int]] = {}
    last: dict[str, int] = {}
    for name in names:
        found = _LAYER.search(name)
        if found:
            stack, index = name[: found.start()], int(found[1])
            layers[name] = stack, index
            last[stack] = max(last.get(stack, 0), index)
    return {
        name: (layers[name][1] / last[layers[name][0]] if last[layers[name][0]] else 1.0)
        if name in layers
        else 0.0
        for name in names
    }
