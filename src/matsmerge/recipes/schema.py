"""The JSON Schema of recipes, for editors and other programs."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from matsmerge.methods import METHODS
from matsmerge.methods.mats import Mats, tables
from matsmerge.recipes.recipe import Recipe


def recipe_schema() -> dict[str, Any]:
    """A recipe's schema with every method spelt out."""
    schema = Recipe.model_json_schema(mode="validation")
    definitions = schema["$defs"]
    definitions.pop("MethodSpec")
    for part in ("objective", "solver"):
        for name, cls in tables()[part].items():
            # Without a name, options are those of the default.
            definitions[_definition(part, cls)] = _describe(name, cls) | {"required": []}
    methods = []
    for name, cls in METHODS.items():
        solves = issubclass(cls, Mats)
        definitions[cls.__name__] = _describe(name, cls, _of_parts() if solves else {})
        methods.append({"$ref": f"#/$defs/{cls.__name__}"})
    schema["properties"]["method"] = {
        "description": Recipe.model_fields["method"].description,
        "anyOf": [{"enum": list(METHODS)}, *methods],
    }
    changes = definitions["Override"]["properties"]["method"]
    changes["anyOf"] = [{"enum": list(METHODS)}, {"type": "object"}, {"type": "null"}]
    models = schema["properties"]["models"]
    models["items"] = {"anyOf": [{"type": "string"}, models["items"]]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _definition(part: str, cls: type[BaseModel]) -> str:
    return f"{cls.__name__}{part.capitalize()}"


def _describe(
    name: str, cls: type[BaseModel], others: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A class of options; `others` are what may be given besides its own fields."""
    own = cls.model_json_schema()
    properties = {key: _or_over_depth(field) for key, field in own.get("properties", {}).items()}
    if others:
        properties |= {part: _part(part) for part in ("init", "objective", "solver")}
        properties["stages"] = {
            "type": "array",
            "description": properties["stages"]["description"],
            "items": {
                "type": "object",
                "properties": {
                    **others,
                    "objective": _part("objective"),
                    "solver": _part("solver"),
                },
                "additionalProperties": False,
            },
        }
    return {
        "type": "object",
        "description": (cls.__doc__ or "").strip(),
        "properties": {"name": {"const": name}, **(others or {}), **properties},
        "required": ["name", *own.get("required", [])],
        "additionalProperties": False,
    }


def _part(part: str) -> dict[str, Any]:
    """A part by its name, or with options."""
    table = tables()[part]
    if part == "init":
        options: list[dict[str, Any]] = [{"type": "object"}]
    else:
        options = [{"$ref": f"#/$defs/{_definition(part, cls)}"} for cls in table.values()]
    return {"anyOf": [{"enum": list(table)}, *options]}


def _of_parts() -> dict[str, Any]:
    """The options of all parts, which may be given without naming the part."""
    found: dict[str, Any] = {}
    for part, table in reversed(list(tables().items())):
        for cls in table.values():
            if part != "init" or not issubclass(cls, Mats):
                fields = cls.model_json_schema().get("properties", {})
                found |= {key: _or_over_depth(field) for key, field in fields.items()}
    found.pop("model", None)  # of passthrough, which nobody starts from
    return found


def _or_over_depth(field: dict[str, Any]) -> dict[str, Any]:
    """A number may also be a list of numbers spread over the depth of the network."""
    if field.get("type") != "number":
        return field
    outer: dict[str, Any] = {
        key: field[key] for key in ("description", "default", "title") if key in field
    }
    number = {key: value for key, value in field.items() if key not in outer}
    return {**outer, "anyOf": [number, {"type": "array", "items": number, "minItems": 1}]}
