"""Recipes from files: ours, and mergekit's."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from matsmerge.errors import RecipeError
from matsmerge.files.strict_yaml import read_yaml
from matsmerge.problems import reworded
from matsmerge.recipes.mergekit import from_mergekit
from matsmerge.recipes.recipe import Recipe, make_recipe


def read_recipe(path: Path) -> tuple[Recipe, list[str]]:
    """Read a recipe file, ours or mergekit's; with notes on what a translation decided."""
    if path.is_dir():
        raise RecipeError(f"{path}: is a folder, not a recipe; models are given with --model")
    data = read_yaml(path, RecipeError)
    if not isinstance(data, Mapping):
        raise RecipeError(f"{path}: expected a mapping with 'models' and 'method'")
    notes: list[str] = []
    with reworded(before=f"{path}: "):
        if "merge_method" in data:
            data, notes = from_mergekit(data)
        return make_recipe(data), notes


def recipe_text(recipe: Recipe) -> str:
    """A recipe as a file has it, without defaults, in the order in which one reads it."""
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    first = [key for key in ("base", "models", "method") if key in content]
    content = {key: content[key] for key in [*first, *(k for k in content if k not in first)]}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
