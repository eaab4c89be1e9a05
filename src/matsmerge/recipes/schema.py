"""The JSON Schema of recipes, for editors and other programs."""

from typing import Any

from matsmerge.recipes.recipe import Recipe


def recipe_schema() -> dict[str, Any]:
    """A recipe's schema with every option of every method, objective and solver."""
    schema = Recipe.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
