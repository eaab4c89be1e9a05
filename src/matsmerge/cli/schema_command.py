"""`mats schema`."""

import json


def schema() -> None:
    """Print the JSON Schema of recipes, for editors that check YAML as you type."""
    from matsmerge.recipes.recipe import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))
