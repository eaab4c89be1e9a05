"""Translating mergekit's YAML into recipes.

What mergekit ignores is noted. What it does and we cannot do is refused by name.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matsmerge.errors import RecipeError, closest
from matsmerge.methods.method import Method
from matsmerge.problems import noted
from matsmerge.recipes.mergekit_groups import Group, has_base
from matsmerge.recipes.mergekit_methods import (
    added_options,
    find_method,
    is_unused,
    our_name,
)
from matsmerge.recipes.mergekit_reader import MergekitReader
from matsmerge.recipes.mergekit_settings import (
    Conditions,
    Settings,
    as_override,
    filtered,
    patterns_within,
    read_setting,
    share_weights,
    unfiltered,
    weights_on_arc,
)
from matsmerge.recipes.recipe import WIDEST, short_names
from matsmerge.recipes.recipe_parts import ModelOverride

_LISTS = ("models", "slices", "modules")
_KEYS = (
    *("merge_method", "parameters", "base_model", "dtype", "out_dtype", "tokenizer_source"),
    *("tokenizer", "chat_template", "name"),
)
# Parameters of the parts that mergekit names, where their names do not begin so.
_MODULES = {
    "default": ["*"],
    "text_decoder": [
        *("*language_model*", "model.layers.*", "model.embed_tokens*", "model.norm*", "lm_head*"),
    ],
    "vision_tower": ["*vision_tower*", "*visual.blocks*", "*visual.patch*", "*visual.pos_embed*"],
    "vision_model": ["*vision_model*"],
    "multi_modal_projector": ["*multi_modal_projector*", "*visual.merger*", "*deepstack*"],
    "encoder": ["encoder.*", "model.encoder.*"],
    "decoder": ["decoder.*", "model.decoder.*", "lm_head*", "proj_out*"],
}


def from_mergekit(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our recipe, as plain data, for a mergekit configuration; with notes on the translation."""
    translation = _Translation(data=data)
    recipe = translation.recipe()
    if translation.problems:
        RecipeError.raise_all(dict.fromkeys([*translation.problems, *translation.misplaced]))
    return recipe, list(dict.fromkeys([*translation.misplaced, *translation.notes]))


def read_tokenizer_choice(data: Mapping[str, Any]) -> Any:
    """What `tokenizer` or `tokenizer_source` is as the recipe's `tokenizer`; None for neither.

    A source alone is a mapping with nothing else; models in it are named as they are.
    """
    given, source = data.get("tokenizer"), data.get("tokenizer_source")
    if given is not None and source is not None:
        raise RecipeError("tokenizer and tokenizer_source say the same; give one of them")
    if source is None:
        return given
    # Earlier versions of mergekit wrote a model so, and so do cards of that time.
    return {"source": source.removeprefix("model:") if isinstance(source, str) else source}


@dataclass
class _Translation(MergekitReader):
    data: Mapping[str, Any] = field(default_factory=dict)
    stacks: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)  # of all models, in their order

    def recipe(self) -> dict[str, Any]:
        data = self.data
        self.note_unknown({k: v for k, v in data.items() if k not in _LISTS}, _KEYS, "")
        given = [key for key in _LISTS if data.get(key)]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            self.problems.append(f"expected one of {', '.join(_LISTS)}, found {found}")
            return {}
        base = self.read_path(data["base_model"]) if data.get("base_model") else None
        groups = [group for group in self._groups(given[0], base) if group.sources]
        settled = []
        for group in groups:
            with noted(self.problems, RecipeError):
                settled.append((group, *self._settle(group)))
        if self.problems:
            return {}
        names = dict(zip(self.paths, short_names(self.paths), strict=True))
        recipe: dict[str, Any] = {
            "models": [{"model": path, "name": names[path]} for path in self.paths],
            "overrides": [],
        }
        if self.stacks:
            recipe["stack"] = _renamed(self.stacks, names)
        base = base or next((group.base for group in groups if group.base), None)
        _, _, (method, values) = settled[0]
        recipe["method"] = method | unfiltered(values).get(None, {})
        if given[0] == "modules" and not any(g.wheres == ({},) for g in groups):
            first = "base" if base else names[self.paths[0]]
            recipe["method"] = {"name": "passthrough", "model": first}
            self.notes.append(f"what is in no module is taken from {base or self.paths[0]}")
        for group, models, (own, values) in settled:
            self._apply(group, models, own, values, names, recipe)
        if base is not None:
            recipe["base"] = base
        self._files(recipe)
        return recipe

    def _files(self, recipe: dict[str, Any]) -> None:
        """What is written beside the weights, and how these are stored."""
        data = self.data
        dtype = data.get("out_dtype") or data.get("dtype") or WIDEST
        recipe["dtype"] = str(dtype).removeprefix("torch.")
        for key in ("name", "chat_template"):
            if data.get(key) is not None:
                recipe[key] = str(data[key])
        with noted(self.problems, RecipeError):
            tokenizer = read_tokenizer_choice(data)
            if tokenizer is not None:
                recipe["tokenizer"] = tokenizer

    # What is merged with what.

    def _groups(self, key: str, base: str | None) -> Iterator[Group]:
        whole = [self.read_mapping(self.data.get("parameters"), "parameters")]
        kind = self.data["merge_method"]
        if key != "modules":
            yield from self._module(self.data, kind, base, whole, None)
            return
        modules = self.read_mapping(self.data["modules"], "modules")
        names = sorted(modules, key=lambda name: name != "default")  # others win
        for a in names:
            for b in names:
                if a != b and f"{b}.".startswith(f"{a}."):
                    self.problems.append(f"the modules {a} and {b} overlap; name each part once")
        for name in names:
            module = self.read_mapping(modules[name], name)
            match = None if names == ["default"] else name
            scopes = [self.read_mapping(module.get("parameters"), f"{name}.parameters"), *whole]
            given = [k for k in ("models", "slices") if module.get(k)]
            if len(given) != 1:
                self.problems.append(f"modules.{name}: expected either models or slices")
                continue
            yield from self._module(module, kind, base, scopes, match)

    def _module(
        self,
        given: Mapping[str, Any],
        kind: str,
        base: str | None,
        scopes: Sequence[Mapping[str, Any]],
        module: str | None,
    ) -> Iterator[Group]:
        match = {} if module is None else {"match": _MODULES.get(module, [f"{module}.*"])}
        if given.get("models"):
            sources = [
                self.read_source(e, "models") for e in self.read_entries(given["models"], "models")
            ]
            group = self._taken(Group(kind, sources, base, scopes, (match,)))
            for path, num in Counter(group.paths).items():
                if num > 1:
                    self.problems.append(f"models: {path} is given {num} times; give it once")
            yield group
            return
        slices = self.read_entries(given["slices"], "slices")
        layers: list[dict[str, Any]] = []
        start = 0
        for i, one in enumerate(slices):
            where = f"slices.{i}"
            known = ("sources", "parameters", "base_model", "merge_method")
            self.note_unknown(one, known, f"{where}: ")
            entries = self.read_entries(one.get("sources"), f"{where}.sources")
            sources = [self.read_source(entry, where, "layer_range") for entry in entries]
            ranges = [self.read_range(entry.get("layer_range"), where) for entry in entries]
            if not sources or None in ranges:
                continue
            own = self.read_path(one["base_model"]) if one.get("base_model") else base
            stop = start + ranges[0][1] - ranges[0][0]
            wheres: list[dict[str, Any]] = [{**match, "layers": [start, stop]}]
            wheres += [{**match, "layers": "before"}] if i == 0 else []
            wheres += [{**match, "layers": "after"}] if i == len(slices) - 1 else []
            group = self._taken(
                Group(
                    one.get("merge_method", kind),
                    sources,
                    own,
                    [self.read_mapping(one.get("parameters"), where), *scopes],
                    tuple(wheres) if len(slices) > 1 else (match,),
                    any(r[0] != start for r in ranges),
                )
            )
            layers.append(self._layers(group, ranges, base))
            start = stop
            yield group
        self.stacks.append({**match, "layers": layers})

    def _taken(self, group: Group) -> Group:
        """A group as it is to be merged.

        People fold an adapter into a model by `model+adapter` as the base and the only model.
        """
        if not group.adds_nothing:
            return group
        self.notes.append(f"no model is merged into {group.base}, which is taken as it is")
        return group.as_it_is()

    def _layers(self, group: Group, ranges: Sequence[Any], base: str | None) -> dict[str, Any]:
        """The ranges of a slice, by the paths of the models; the base's where it is not one."""
        found: dict[str, Any] = dict(zip(group.paths, ranges, strict=True))
        if len(found) < len(ranges):
            self.problems.append(
                f"slices: {', '.join(group.paths)}: a model is given twice, and mergekit takes its "
                "last range; make each range a document of its own with a name (passthrough), and "
                "merge these"
            )
        with noted(self.problems, RecipeError):
            if not group.has_base_apart:
                return found
        of_base = found.pop(str(group.base), None)
        if not found:
            self.problems.append(f"slices: {group.base}: there is no model besides the base")
        elif group.base != base:
            if of_base is None:
                self.problems.append(f"slices: list the base {group.base} among the sources")
            self._add([str(group.base)])
            found["base"] = {"model": group.base, "layers": of_base}
        elif of_base is not None:
            found["base"] = of_base
        return found

    def _add(self, paths: Iterable[str]) -> None:
        self.paths += [path for path in dict.fromkeys(paths) if path not in self.paths]

    # How it is merged.

    def _settle(self, group: Group) -> tuple[list[str], tuple[dict[str, Any], Settings]]:
        """The models of a group, its method, and the values of all its parameters."""
        known, ours = find_method(group.kind)
        base, paths = group.base, group.paths
        if known.base == "required" and base is None:
            raise RecipeError(f"mergekit's {group.kind} needs 'base_model'")
        is_alone = group.kind == "passthrough" or bool(self.stacks)
        is_model = not is_alone if known.base == "ignored" else not has_base(known, ours)
        if base is not None and base not in paths and is_model:
            paths = [*paths, base]  # mergekit adds it
        if group.has_base_apart:
            paths = [path for path in paths if path != base]
        elif ours.num_models == 2 and base in paths:
            paths = [str(base), *(path for path in paths if path != base)]  # t = 0 is there
        if not paths:
            raise RecipeError(f"{group.kind}: there is no model besides the base {base}")
        if group.kind == "passthrough" and len(paths) > 1:
            raise RecipeError(
                f"passthrough takes one model as it is, found {', '.join(paths)}; give each a "
                "slice or a document of its own, or choose a method that merges"
            )
        self._add(paths)
        own = dict(group.sources)
        values: Settings = {}
        method = {"name": ours.name, **added_options(ours)}
        if known.base == "optional" and base is not None and "task_vectors" in ours.model_fields:
            method["task_vectors"] = True
        for key in sorted({k for scope in (*group.scopes, *own.values()) for k in scope}):
            if key not in known.shared and key not in known.own:
                said = f"mergekit ignores the parameter '{key}' for {group.kind}"
                if key in _KEYS:
                    self.misplaced.append(f"{said}; it belongs beside 'merge_method'")
                else:
                    self.notes.append(f"{said}{closest(key, [*known.shared, *known.own])}")
            elif is_unused(group.kind, key):
                self.notes.append(f"{key}: does not change what {group.kind} gives; not needed")
        for key, default in known.shared.items():
            if is_unused(group.kind, key):
                continue
            found = read_setting(key, group.scopes, default, group.kind, self.problems)
            if key == "t" and our_name(ours, key) is None:
                weights = weights_on_arc(found, self.problems)
                values |= {(p, "weight"): w for p, w in zip(paths, weights, strict=False)}
            else:
                self._set_method(ours, key, found, default, values)
        for key, default in known.own.items():
            if is_unused(group.kind, key):
                continue
            of_models = {
                path: read_setting(
                    key,
                    [own.get(path, {}), *group.scopes],
                    default,
                    path,
                    self.problems,
                    is_renumbered=group.is_renumbered,
                )
                for path in paths
            }
            if key in ModelOverride.model_fields:
                values |= {(path, key): found for path, found in of_models.items()}
            elif len({str(found) for found in of_models.values()}) > 1:
                self.problems.append(
                    f"{group.kind}: '{key}' differs between models, and here it is one for all; "
                    "give all models the same"
                )
            else:
                self._set_method(ours, key, next(iter(of_models.values())), default, values)
        if ours.name == "nuslerp":
            share_weights(paths, values)
        return paths, (method, values)

    def _set_method(
        self,
        ours: type[Method],
        key: str,
        found: Conditions,
        default: Any,
        values: Settings,
    ) -> None:
        name = our_name(ours, key)
        if name is not None:
            values[None, name] = found
            return
        self.problems += [
            f"'{key}: {value}' is not supported for {ours.name}, only {default}; make this part of "
            "the merge with mergekit, and give its result as a model"
            for value, _ in found
            if value != default
        ]

    def _apply(
        self,
        group: Group,
        models: Sequence[str],
        method: dict[str, Any],
        values: Settings,
        names: Mapping[str, str],
        recipe: dict[str, Any],
    ) -> None:
        """Write a group's values into the recipe: as its own, or as overrides."""
        for where in group.wheres:
            found = unfiltered(values)
            change = method | found.pop(None, {})
            if method["name"] == recipe["method"]["name"] and "model" in recipe["method"]:
                change["model"] = names[models[0]]  # not the one of what is in no module
            if where:
                is_fixed = not any(isinstance(value, list) for value in change.values())
                only = {} if "layers" in where else {"only": [names[path] for path in models]}
                is_known = change == recipe["method"] and is_fixed
                override = as_override({} if is_known else change, found, names) | only
                if override:
                    # A module has to be there; of slices all that comes before layers may not be.
                    required = False if "layers" in where else "any"
                    recipe["overrides"].append({**where, **override, "required": required})
            else:
                for entry in recipe["models"]:
                    entry |= found.get(entry["model"], {})
            for pattern, changes in filtered(values):
                override = as_override(changes.pop(None, {}), changes, names)
                match = list(patterns_within(pattern, where.get("match")))
                recipe["overrides"].append({**where, "match": match, **override, "required": False})


def _renamed(stacks: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Stacks with the names of models in place of their paths."""

    def renamed(path: str, given: Any) -> tuple[str, Any]:
        if isinstance(given, Mapping):
            given = {**given, "model": names[given["model"]]}
        return names.get(path, path), given

    return [
        {**stack, "layers": [dict(renamed(*pair) for pair in r.items()) for r in stack["layers"]]}
        for stack in stacks
    ]
