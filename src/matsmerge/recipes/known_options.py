"""Names and values that recipes may use, as data: help and first errors need not wait for torch.

`known_options.json` is made from the classes by `python -m matsmerge.recipes.known_options`, and a
test compares it with them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from matsmerge.errors import RecipeError, closest
from matsmerge.files.guarded_files import local_path
from matsmerge.files.strict_yaml import read_yaml_documents
from matsmerge.problems import problems_of

FILE = Path(__file__).with_suffix(".json")
# Options of a method, objective or solver: what values they take, what they are for, and limits of
# numbers. Values are the name of a type, choices as `a|b`, `part` for another table's names, or
# something else (None).
Known = Mapping[str, tuple[str | None, str, Mapping[str, float]]]
_OF_MERGEKIT = {"base_model", "slices", "modules", "tokenizer_source"}  # keys of its alone
_TYPES = {"bool": bool, "float": float, "int": int, "str": str, "names": str | list[str]}


@cache
def known_options() -> dict[str, Any]:
    """The keys of recipes, and the tables of methods, objectives and solvers with their options."""
    known: dict[str, Any] = json.loads(FILE.read_text())
    return known


def known_parts() -> Mapping[str, Mapping[str, Known]]:
    """The options of every method (`init`), `objective` and `solver`."""
    found: Mapping[str, Mapping[str, Known]] = known_options()["tables"]
    return found


def describe_options() -> dict[str, Any]:
    """What the file is to say."""
    from matsmerge.methods import parts
    from matsmerge.recipes.recipe import Recipe
    from matsmerge.recipes.recipe_parts import ModelEntry, Override

    def kind(annotation: Any) -> str | None:
        if isinstance(annotation, UnionType):  # what may be left out
            (annotation, *others) = (one for one in get_args(annotation) if one is not NoneType)
            if others:
                return None
        if get_origin(annotation) is Literal:
            return "|".join(get_args(annotation))
        if annotation == tuple[str, ...]:
            return "names"
        return annotation.__name__ if annotation in (bool, float, int, str) else None

    def limits(field: FieldInfo) -> dict[str, float]:
        names = ("ge", "gt", "le", "lt")
        return {n: getattr(m, n) for m in field.metadata for n in names if hasattr(m, n)}

    return {
        "recipe": list(Recipe.model_fields),
        "models": list(ModelEntry.model_fields),
        "overrides": list(Override.model_fields),
        "tables": {
            part: {
                name: {
                    key: [
                        "part" if key in parts.part_classes() else kind(f.annotation),
                        f.description,
                        limits(f),
                    ]
                    for key, f in cls.model_fields.items()
                }
                for name, cls in table.items()
            }
            for part, table in parts.part_classes().items()
        },
    }


def read_written(path: str | Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The documents of a recipe file before they are checked, each with what errors begin with."""
    path = local_path(path)
    if path.is_dir():
        raise RecipeError(f"{path}: is a folder, not a recipe; models are given with --model")
    documents = read_yaml_documents(path, RecipeError)
    found = []
    for i, data in enumerate(documents):
        if not isinstance(data, Mapping):
            raise RecipeError(f"{path}: expected a mapping with 'models' and 'method'")
        if "experts" in data and not data.keys() & {"models", "slices", "modules"}:
            raise RecipeError(
                f"{path}: is a recipe of mergekit-moe, which makes models the experts of a new one "
                "and merges nothing; run it with mergekit-moe, and merge its result here like any "
                "other model"
            )
        if _is_of_mergekit(data) and not data.keys() & {"merge_method", "method"}:
            raise RecipeError(
                f"{path}: is mergekit's YAML and says no merge_method, such as ties or slerp"
            )
        several = f"document {data.get('name') or i + 1}: " if len(documents) > 1 else ""
        found.append((f"{path}: {several}", data))
    return found


def _is_of_mergekit(data: Mapping[str, Any]) -> bool:
    """Whether a document has what mergekit's YAML alone has."""
    models = data.get("models")
    entries = models if isinstance(models, list) else []
    has_parameters = any(isinstance(e, Mapping) and "parameters" in e for e in entries)
    return has_parameters or bool(data.keys() & _OF_MERGEKIT)


def check_early(path: str | Path) -> None:
    """Refuse a recipe file that is no YAML, or has unknown keys, or wrong values of its method."""
    RecipeError.raise_all(
        where + problem
        for where, data in read_written(path)
        if "merge_method" not in data  # which is mergekit's
        for problem in (*_unknown_names(data), *_wrong_values(data.get("method")))
    )


def _unknown_names(data: Mapping[str, Any]) -> Iterator[str]:
    known = known_options()
    yield from _unknown_keys("", data, known["recipe"])
    for part in ("models", "overrides"):
        entries = data.get(part)
        for number, entry in enumerate(entries if isinstance(entries, list) else ()):
            yield from _unknown_keys(f"{part}.{number}: ", entry, known[part])
    method = data.get("method")
    name = method.get("name") if isinstance(method, Mapping) else method
    methods = known_parts()["init"]
    if isinstance(name, str) and name not in methods:
        yield f"method: unknown method '{name}'{closest(name, methods)}"


def _wrong_values(given: Any, part: str = "init", where: str = "method: ") -> Iterator[str]:
    """Values of no kind or size that an option takes; what else is wrong is found later."""
    name = str(given.get("name")) if isinstance(given, Mapping) else ""
    known = known_parts()[part].get(name)
    if known is None:
        return
    for key, value in given.items():
        kind, _, limits = known.get(key, (None, "", {}))
        if kind == "part":
            yield from _wrong_values(value, key, f"{where}{name}.{key}.")
        elif kind is not None and value is not None:
            # A number may be a list of numbers over the depth of the model.
            for one in value if kind == "float" and isinstance(value, list) else [value]:
                try:
                    _adapter(kind, **limits).validate_python(one)
                except ValidationError as error:
                    yield from (f"{where}{name}.{key}: {line}" for line in problems_of(error))


@cache
def _adapter(kind: str, **limits: Any) -> TypeAdapter[Any]:
    if kind == "float":
        return TypeAdapter(Annotated[float, Field(allow_inf_nan=False, **limits)])
    one_of: Any = Literal
    expected: Any = _TYPES[kind] if kind in _TYPES else one_of[tuple(kind.split("|"))]
    return TypeAdapter(Annotated[expected, Field(**limits)])


def _unknown_keys(where: str, given: Any, known: Iterable[str]) -> Iterator[str]:
    for key in given if isinstance(given, Mapping) else ():
        if key not in known:
            yield f"{where}unknown key '{key}'{closest(str(key), known)}"


if __name__ == "__main__":
    FILE.write_text(json.dumps(describe_options(), indent=1) + "\n")
