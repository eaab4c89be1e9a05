"""Settings of mergekit's parameters: numbers, lists over depth, and values for filters."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matsmerge.recipes.mergekit_methods import REQUIRED

# The values of a setting, each with the filter it is for: the first without one, and those that
# win last.
Conditions = list[tuple[Any, str | None]]
# Of a merge, by the path of a model, None for its method, and by the parameter's name.
Settings = dict[tuple[str | None, str], Conditions]
_Changes = dict[str | None, dict[str, Any]]  # by the path of a model, None for the method

_LAYER_NUMBER = re.compile(r"(^|\.|layers?|blocks?|h)\.?\d+(\.|$)")


def read_setting(
    key: str,
    scopes: Sequence[Mapping[str, Any]],
    default: Any,
    where: str,
    problems: list[str],
    *,
    is_renumbered: bool = False,
) -> Conditions:
    """The values of a parameter from several mappings, of which the first counts most.

    `is_renumbered` says that layers have other numbers in the result than in the models, for which
    mergekit's filters are.
    """
    found: Conditions = []
    for scope in scopes:
        setting = scope.get(key)
        items = [setting] if isinstance(setting, Mapping) else setting
        if not (isinstance(items, list) and any(isinstance(v, Mapping) for v in items)):
            items = [] if items is None or items == [] else [{"value": items}]
        for item in items:
            if not isinstance(item, Mapping) or "value" not in item:
                problems.append(
                    f"{where}: '{key}': expected entries with 'value' and 'filter', found {item!r}"
                )
                return []
            text = item.get("filter")
            if text in (None, "*"):  # the first condition that holds decides
                return [(item["value"], None), *reversed(found)]
            if is_renumbered and _LAYER_NUMBER.search(str(text)):
                problems.append(
                    f"{where}: the filter '{text}' names a layer, whose number is another in the "
                    "result; give its slice a parameter of its own"
                )
            found.append((item["value"], str(text)))
    if default is REQUIRED:
        problems.append(
            f"mergekit needs a '{key}' for every parameter of {where}; add one without a filter"
        )
    return [(default, None), *reversed(found)]


def weights_on_arc(found: Conditions, problems: list[str]) -> tuple[Conditions, Conditions]:
    """The weights of two models, 1 - t and t, for mergekit's t."""
    weights: tuple[Conditions, Conditions] = ([], [])
    for t, pattern in found:
        try:
            ts = [float(v) for v in t] if isinstance(t, list) else float(t)
        except (TypeError, ValueError):
            if t is not REQUIRED:
                problems.append(f"the parameter 't' must be numbers, found {t!r}")
            continue
        rest = [1 - v for v in ts] if isinstance(ts, list) else 1 - ts
        for of_model, weight in zip(weights, (rest, ts), strict=True):
            of_model.append((weight, pattern))
    return weights


def share_weights(paths: Sequence[str], settings: Settings) -> None:
    """Give two models half of the weight each where mergekit does: if theirs add up to nothing."""
    weights = [settings.get((path, "weight"), []) for path in paths]
    values = [value for conditions in weights for value, _ in conditions]
    are_numbers = all(isinstance(value, (int, float)) for value in values)
    if len(values) == len(paths) == 2 and are_numbers and abs(sum(values)) < 1e-6:
        settings |= {(path, "weight"): [(0.5, None)] for path in paths}


def unfiltered(settings: Settings) -> _Changes:
    """What holds where no filter does."""
    found: _Changes = {}
    for (path, key), conditions in settings.items():
        if conditions and conditions[0][0] is not None:
            found.setdefault(path, {})[key] = conditions[0][0]
    return found


def filtered(settings: Settings) -> Iterator[tuple[str, _Changes]]:
    """Filters with what they change, those that win last; each once where all have one order."""
    orders = [[pattern for _, pattern in conditions[1:]] for conditions in settings.values()]
    order = max(orders, key=len, default=[])
    if all(own == [p for p in order if p in own] for own in orders):
        for pattern in order:
            changes: _Changes = {}
            for (path, key), conditions in settings.items():
                for value, of in conditions[1:]:
                    if of == pattern:
                        changes.setdefault(path, {})[key] = value
            yield str(pattern), changes
        return
    for (path, key), conditions in settings.items():
        for value, pattern in conditions[1:]:
            yield str(pattern), {path: {key: value}}


def as_override(
    method: Mapping[str, Any], models: Mapping[Any, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    """What an override says to change a method and models, which `names` has by their paths."""
    own = {names[path]: changes for path, changes in models.items()}
    return {**({"method": dict(method)} if method else {}), **({"models": own} if own else {})}


def patterns_within(text: str, patterns: Sequence[str] | None) -> Iterator[str]:
    """Patterns of names that hold a text, among those that match one of the patterns."""
    held = re.sub(r"([*?\[])", r"[\1]", text)
    if patterns is None or "*" in patterns:
        yield f"*{held}*"
        return
    for pattern in patterns:
        yield f"{pattern.rstrip('*')}*{held}*"
        if pattern.startswith("*"):
            yield f"*{held}*{pattern.lstrip('*')}"
