"""Translating mergekit's YAML for the methods we share.

What has no counterpart here is refused by name, never ignored.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matsmerge.errors import RecipeError, closest
from matsmerge.recipes.recipe import short_names

_SAME = ("task_arithmetic", "ties", "dare_ties", "dare_linear", "slerp", "model_stock")
_METHODS = {"linear": "average", **{name: name for name in _SAME}}
_KEYS = (
    "merge_method", "models", "parameters", "base_model", "dtype", "out_dtype", "tokenizer",
    "tokenizer_source",
)  # fmt: skip
# mergekit's name -> ours, for parameters of the whole merge and of one model
_SCALED = {"normalize": "normalize", "lambda": "scale"}
_SHARED: Mapping[str, Mapping[str, str]] = {
    "linear": {"normalize": "normalize"},
    "task_arithmetic": _SCALED,
    "ties": _SCALED,
    "dare_ties": {**_SCALED, "rescale": "rescale"},
    "dare_linear": {**_SCALED, "rescale": "rescale"},
    "slerp": {},
    "model_stock": {},
}
_PER_MODEL: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("linear", "task_arithmetic"), ("weight",)),
    **dict.fromkeys(("ties", "dare_ties", "dare_linear"), ("weight", "density")),
    **dict.fromkeys(("slerp", "model_stock"), ()),
}
# What mergekit assumes where its defaults are not ours.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ties": {"trim": "parameter", "density": 1.0},
    "dare_ties": {"normalize": False, "density": 1.0},
    "dare_linear": {"density": 1.0},
}


def from_mergekit(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our recipe, as plain data, for a mergekit configuration; with notes on the translation."""
    kind = data["merge_method"]
    if not isinstance(kind, str) or kind not in _METHODS:
        raise RecipeError(
            f"mergekit's merge_method '{kind}' is not supported{closest(str(kind), _METHODS)}"
        )
    translation = _Translation(kind, data)
    recipe = translation.recipe()
    RecipeError.raise_all(translation.problems)
    return recipe, translation.notes


@dataclass
class _Translation:
    kind: str
    data: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    overrides: list[dict[str, Any]] = field(default_factory=list)
    adapted: list[str] = field(default_factory=list)  # models under an adapter: `model+adapter`

    def recipe(self) -> dict[str, Any]:
        self.problems += [
            f"mergekit's key '{key}' is not supported; remove it or use mergekit for this merge"
            for key in self.data
            if key not in _KEYS
        ]
        base = self.data.get("base_model")
        base = None if base is None else self._path(base)
        shared = self._mapping(self.data.get("parameters"), "parameters")
        given = self.data.get("models")
        if not isinstance(given, list) or not all(isinstance(m, Mapping) for m in given):
            self.problems.append("'models' must be a list of entries with a 'model' each")
            return {}
        paths = [self._path(entry.get("model")) for entry in given]
        own = [self._mapping(e.get("parameters"), p) for e, p in zip(given, paths, strict=True)]
        for entry, path in zip(given, paths, strict=True):
            self.problems += [
                f"mergekit's key '{key}' of model {path} is not supported"
                for key in entry
                if key not in ("model", "parameters")
            ]
        if self.kind == "slerp":
            if base is None:
                self.problems.append("mergekit's slerp needs 'base_model': where t = 0 is")
                return {}
            if base not in paths:
                paths, own = [base, *paths], [{}, *own]
        elif self.kind != "linear":
            # mergekit lists the base among the models; it has no task vector.
            kept = [i for i, path in enumerate(paths) if path != base]
            paths, own = [paths[i] for i in kept], [own[i] for i in kept]
        elif base is not None and base not in paths:
            self.problems.append(
                "mergekit's linear counts 'base_model' as a model: list it under 'models', or "
                "remove it"
            )

        names = short_names(paths)
        method: dict[str, Any] = {"name": _METHODS[self.kind], **_DEFAULTS.get(self.kind, {})}
        models = [{"model": p, "name": n} for p, n in zip(paths, names, strict=True)]
        for key, value in shared.items():
            self._shared(key, value, method)
        for i, (name, parameters) in enumerate(zip(names, own, strict=True)):
            for key in parameters.keys() - set(_PER_MODEL[self.kind]):
                self.problems.append(
                    f"mergekit's parameter '{key}' of model {paths[i]} is not supported for "
                    f"{self.kind}{closest(key, _PER_MODEL[self.kind])}"
                )
            if "weight" in _PER_MODEL[self.kind] and not any(
                _always_applies(source.get("weight")) for source in (parameters, shared)
            ):
                self.problems.append(
                    f"mergekit needs a 'weight' for every parameter of model {paths[i]}; add one "
                    "without a filter"
                )
            for key in _PER_MODEL[self.kind]:
                # The shared setting holds only where the model's own has no answer.
                if key in shared and not _always_applies(parameters.get(key)):
                    self._set(models[i], key, shared[key], name)
                if key in parameters:
                    self._set(models[i], key, parameters[key], name)
        if self.kind == "slerp":
            self._slerp(shared.get("t"), models, paths.index(base or ""))
        recipe: dict[str, Any] = {"models": models, "method": method}
        if base is not None:
            recipe["base"] = base
        if self.adapted:
            recipe |= {"base": self.adapted[0], "output": "dense"}
            if {base or self.adapted[0], *self.adapted} != {self.adapted[0]}:
                self.problems.append(
                    f"adapters are on {', '.join(sorted(set(self.adapted)))}, and the base is "
                    f"{base}; adapters on other models than the base must be folded into them "
                    "first (mats merge --output dense)"
                )
        if self.overrides:
            recipe["overrides"] = self.overrides
        tokenizers = [
            value for key in ("tokenizer", "tokenizer_source") if (value := self.data.get(key))
        ]
        if len(tokenizers) > 1:
            self.problems.append("mergekit takes either tokenizer or tokenizer_source, not both")
        if tokenizers:
            recipe["tokenizer"] = tokenizers[0]
        dtype = self.data.get("out_dtype") or self.data.get("dtype")
        if dtype is not None:
            recipe["dtype"] = dtype
        return recipe

    def _shared(self, key: str, value: Any, method: dict[str, Any]) -> None:
        if key in _PER_MODEL[self.kind] or (self.kind == "slerp" and key == "t"):
            return
        if key == "int8_mask" and self.kind not in ("linear", "slerp", "model_stock"):
            self.notes.append(
                "int8_mask: saves memory in mergekit and does not change the result; not needed"
            )
        elif key in _SHARED[self.kind]:
            self._set(method, _SHARED[self.kind][key], value)
        else:
            known = [*_SHARED[self.kind], *_PER_MODEL[self.kind]]
            self.problems.append(
                f"mergekit's parameter '{key}' is not supported for {self.kind}"
                f"{closest(key, known)}"
            )

    def _set(self, place: dict[str, Any], key: str, setting: Any, model: str | None = None) -> None:
        """Set a parameter of the method or of a model, or where a value is filtered override it."""
        for value, pattern in self._conditions(setting):
            if pattern is None:
                place[key] = value
            else:
                change = {key: value}
                what = {"method": change} if model is None else {"models": {model: change}}
                self.overrides.append({"match": pattern, **what})

    def _slerp(self, setting: Any, models: list[dict[str, Any]], start: int) -> None:
        if not _always_applies(setting):
            self.problems.append("mergekit's slerp needs the parameter 't' for every parameter")
            return
        first, second = models[start], models[1 - start] if len(models) == 2 else models[start]

        for t, pattern in self._conditions(setting):
            try:
                rest = [1 - float(v) for v in t] if isinstance(t, list) else 1 - float(t)
                t = [float(v) for v in t] if isinstance(t, list) else float(t)
            except (TypeError, ValueError):
                self.problems.append(f"mergekit's slerp parameter 't' must be numbers, found {t!r}")
                continue
            if pattern is None:
                first["weight"], second["weight"] = rest, t
            else:
                weights = {first["name"]: {"weight": rest}, second["name"]: {"weight": t}}
                self.overrides.append({"match": pattern, "models": weights})

    def _conditions(self, setting: Any) -> list[tuple[Any, str | None]]:
        """Each value with the pattern it is for, in an order in which the last one wins."""
        items = [setting] if isinstance(setting, Mapping) else setting
        if not (isinstance(items, list) and any(isinstance(v, Mapping) for v in items)):
            return [(setting, None)]
        conditions: list[tuple[Any, str | None]] = []
        for item in items:
            known = {"value", "filter"}
            if not isinstance(item, Mapping) or "value" not in item or item.keys() - known:
                self.problems.append(f"expected entries with 'value' and 'filter', found {item!r}")
                return []
            text = item.get("filter")
            if text in (None, "*"):  # in mergekit the first condition that holds decides
                conditions.append((item["value"], None))
                break
            conditions.append((item["value"], f"*{_escape(str(text))}*"))
        return conditions[::-1]

    def _mapping(self, value: Any, where: str) -> Mapping[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.problems.append(f"{where}: expected a mapping of parameters, found {value!r}")
            return {}
        return value

    def _path(self, reference: Any) -> str:
        if isinstance(reference, Mapping):
            inner = reference.get("model")
            if isinstance(inner, Mapping) and reference.keys() == {"model"} and "path" in inner:
                revision = f"@{inner['revision']}" if inner.get("revision") else ""
                if inner.keys() <= {"path", "revision"}:
                    return f"{inner['path']}{revision}"
            self.problems.append(f"mergekit's model reference {dict(reference)!r} is not supported")
            return "?"
        if not isinstance(reference, str):
            self.problems.append(f"expected the name of a model, found {reference!r}")
            return "?"
        model, plus, adapter = reference.partition("+")
        if plus:
            self.adapted.append(model)
            return adapter
        return reference


def _always_applies(setting: Any) -> bool:
    items = setting if isinstance(setting, list) else [setting]
    return setting is not None and any(
        not isinstance(item, Mapping) or item.get("filter") in (None, "*") for item in items
    )


def _escape(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)
