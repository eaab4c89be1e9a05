"""The JSON Schema of recipes, for editors and other programs."""

from typing import Any

from matsmerge.methods import METHODS
from matsmerge.recipes.recipe import Recipe


def recipe_schema() -> dict[str, Any]:
    """A recipe's schema with every method spelt out."""
    schema = Recipe.model_json_schema(mode="validation")
    definitions = schema["$defs"]
    definitions.pop("MethodSpec")
    methods = []
    for name, cls in METHODS.items():
        own = cls.model_json_schema()
        properties = {
            key: _or_over_depth(field) for key, field in own.get("properties", {}).items()
        }
        definitions[cls.__name__] = {
            "type": "object",
            "description": (cls.__doc__ or "").strip(),
            "properties": {"name": {"const": name}, **properties},
            "required": ["name", *own.get("required", [])],
            "additionalProperties": False,
        }
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


def _or_over_depth(field: dict[str, Any]) -> dict[str, Any]:
    """A number may also be a list of numbers spread over the depth of the network."""
    if field.get("type") != "number":
        return field
    outer: dict[str, Any] = {
        key: field[key] for key in ("description", "default", "title") if key in field
    }
    number = {key: value for key, value in field.items() if key not in outer}
    return {**outer, "anyOf": [number, {"type": "array", "items": number, "minItems": 1}]}
