"""Rules: the method, weights and densities that a recipe gives each parameter."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from matsmerge.checkpoints.alignment import matches, unmatched
from matsmerge.errors import RecipeError
from matsmerge.methods.method import Method
from matsmerge.methods.options import at_depth
from matsmerge.methods.site import Shares
from matsmerge.problems import problems_of
from matsmerge.recipes.recipe import Recipe, method_refusals
from matsmerge.recipes.recipe_parts import SHARES, Override

_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


# Embeddings and what else has its turn before the first layer.
_BEFORE = re.compile(r"embed(?!_out)|wte|wpe|(^|\.)shared\.|position|patch|cls_token|pre_la?y")


@dataclass(frozen=True)
class Rule:
    """A method with all its numbers, and the weight and shares of each model that takes part."""

    method: Method
    weights: tuple[float, ...]
    shares: tuple[Shares, ...]
    models: tuple[str, ...] = ()  # their names


@dataclass(frozen=True)
class Place:
    """Where a parameter is: in a layer of a stack, or before or after all layers."""

    stack: str  # what comes before the number in its name: `model.layers`
    layer: int | None
    rest: str  # what comes after it
    last: int = 0  # layer of the stack

    @property
    def is_before(self) -> bool:
        return self.layer is None and bool(_BEFORE.search(self.rest))

    @property
    def depth(self) -> float:
        """From 0 to 1; 0 for what is in no layer, 1 for the only layer of a stack."""
        return 0.0 if self.layer is None else self.depth_within((0, self.last + 1))

    def depth_within(self, layers: tuple[int, int] | str | None) -> float:
        if layers is None:
            return self.depth
        if isinstance(layers, str) or self.layer is None:
            return 0.0
        first, stop = layers
        return (self.layer - first) / (stop - first - 1) if stop - first > 1 else 1.0

    def is_in(self, layers: tuple[int, int] | str | None) -> bool:
        if layers is None:
            return True
        if isinstance(layers, str):
            return self.layer is None and self.is_before == (layers == "before")
        return self.layer is not None and self.layer in range(*layers)


def find_places(names: Iterable[str]) -> dict[str, Place]:
    """Where each parameter is, by the first number in its name.

    Layers are counted for each stack by itself (`encoder.block.3`, `decoder.block.3`).
    """
    places: dict[str, Place] = {}
    last: dict[str, int] = {}
    for name in names:
        found = _LAYER.search(name)
        if found:
            stack, layer = name[: found.start()], int(found[1])
            places[name] = Place(stack, layer, name[found.end() :])
            last[stack] = max(last.get(stack, 0), layer)
        else:
            places[name] = Place("", None, name)
    return {n: p if p.layer is None else replace(p, last=last[p.stack]) for n, p in places.items()}


def check_patterns(recipe: Recipe, names: Sequence[str]) -> list[str]:
    """Refuse an override that would never apply; notes on those that need not."""
    places = find_places(names)
    problems: list[str] = []
    notes: list[str] = []
    applying = [o for o in recipe.overrides if any(_applies(o, n, places[n]) for n in names)]
    for override in recipe.overrides:
        missing = unmatched(override.match, names)
        if override.required is not True and len(missing) < len(override.match):
            missing = []  # the patterns are alternatives
        found = [f"the override pattern '{p}'" for p in missing]
        # A filter of mergekit's becomes an override for each part of the layers.
        elsewhere = not override.required and any(o.match == override.match for o in applying)
        if not found and override not in applying and not elsewhere:
            found = [f"the {override}"]
        said = problems if override.required else notes
        said += [f"{what} matches no parameter, e.g. {names[0]}" for what in found]
    RecipeError.raise_all(problems)
    return list(dict.fromkeys(notes))


def _applies(override: Override, name: str, place: Place) -> bool:
    return matches(name, override.match) and place.is_in(override.layers)


def make_rules(
    recipe: Recipe, names: Sequence[str], taking: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Rule]:
    """The rule for every parameter; parameters treated alike share one rule.

    `taking` are the models that take part in a parameter, by default all.
    """
    places = find_places(names)
    everyone = [str(entry.name) for entry in recipe.models]
    rules: dict[tuple[Any, ...], Rule] = {}
    result: dict[str, Rule] = {}
    for name in names:
        place = places[name]
        own = recipe.overrides
        applying = tuple(i for i, o in enumerate(own) if _applies(o, name, place))
        depths = tuple(place.depth_within(own[i].layers) for i in applying)
        chosen = tuple(m for m in everyone if m in (taking or {}).get(name, everyone))
        key = applying, depths, place.depth, chosen
        if key not in rules:
            rules[key] = _make_rule(recipe, applying, place, chosen, name)
        result[name] = rules[key]
    return result


def _make_rule(
    recipe: Recipe, applying: Iterable[int], place: Place, chosen: Sequence[str], name: str
) -> Rule:
    current, depth = recipe, place.depth
    weights: dict[Any, Any] = {entry.name: entry.weight for entry in recipe.models}
    own: dict[Any, dict[str, Any]] = {
        entry.name: {key: getattr(entry, key) for key in SHARES} for entry in recipe.models
    }
    where = name
    try:
        for override in (recipe.overrides[i] for i in applying):
            where = f"{name}: {override}"
            at = place.depth_within(override.layers)
            if override.method is not None:
                spec = current.overridden(_settled(override, at))
                current = current.model_copy(update={"method": spec})
            for model, change in override.models.items():
                if change.weight is not None:
                    weights[model] = at_depth(change.weight, at)
                given = _given({key: getattr(change, key) for key in SHARES})
                own[model] |= {key: at_depth(value, at) for key, value in given.items()}
            if override.only is not None:
                chosen = [model for model in chosen if model in override.only]
        where = name
        method = current.method.at_depth(depth)
    except ValidationError as error:
        raise RecipeError([f"{where}: {problem}" for problem in problems_of(error)]) from error
    if recipe.chooses_models:
        _check_chosen(name, method, chosen)
    defaults = {key: method.own_share(key) for key in SHARES}
    rule = Rule(
        method,
        tuple(float(at_depth(weights[m], depth)) for m in chosen),
        tuple(_shares({**defaults, **_given(own[m])}, depth) for m in chosen),
        tuple(chosen),
    )
    adds_nothing = method.may_add_nothing and not any(rule.weights)
    # Rounding leaves a little of weights such as 0.1, 0.2 and -0.3.
    is_zero = abs(sum(rule.weights)) <= 1e-12 * sum(map(abs, rule.weights))
    if method.divides_by_weights and is_zero and not adds_nothing:
        undivided = "; say normalize: false" if "normalize" in type(method).model_fields else ""
        raise RecipeError(
            f"{name}: the models' weights {list(rule.weights)} sum to zero, and "
            f"{current.method.name} divides by their sum{undivided}"
        )
    if method.weights_covariances and min(rule.weights) < 0:
        raise RecipeError(
            f"{name}: the models' weights {list(rule.weights)} must not be negative: "
            f"{current.method.name} weighs covariances with them"
        )
    densities = [shares.density for shares in rule.shares]
    if not all(0 < d <= 1 for d in densities):
        raise RecipeError(
            f"{name}: the densities {densities} must be above 0 and at most 1; a model of which "
            "nothing is to be kept has the weight 0"
        )
    found = [method.share_problem(shares) for shares in rule.shares]
    RecipeError.raise_all(f"{name}: {problem}" for problem in dict.fromkeys(found) if problem)
    return rule


def _shares(given: Mapping[str, Any], depth: float) -> Shares:
    return Shares(**{key: float(at_depth(value, depth)) for key, value in _given(given).items()})


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _settled(override: Override, depth: float) -> Override:
    """An override of some layers with the numbers that its method's lists have at a depth."""
    if override.layers is None:
        return override
    method = {
        key: at_depth(value, depth) if all(isinstance(v, (int, float)) for v in value) else value
        for key, value in (override.method or {}).items()
        if isinstance(value, list)
    }
    return override.model_copy(update={"method": {**(override.method or {}), **method}})


def _check_chosen(name: str, method: Method, chosen: Sequence[str]) -> None:
    """Refuse a method that has no meaning for the models that take part in a parameter."""
    problems = [f"{name}: {problem}" for problem in method_refusals(method, len(chosen))]
    if not chosen:
        problems = [f"{name}: no model takes part in it"]
    elif method.only_model not in (None, "base", *chosen):
        problems.append(f"{name}: the model {method.only_model} takes no part in it")
    RecipeError.raise_all(problems)
