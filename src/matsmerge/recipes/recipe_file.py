"""Recipes from files: ours, and mergekit's."""

from collections.abc import Mapping
from pathlib import Path

from matsmerge.checkpoints.source import local_path
from matsmerge.errors import RecipeError
from matsmerge.files.strict_yaml import read_yaml
from matsmerge.problems import reworded
from matsmerge.recipes.mergekit import from_mergekit
from matsmerge.recipes.recipe import Recipe, make_recipe


def read_recipe(path: str | Path) -> tuple[Recipe, list[str]]:
    """Read a recipe file, ours or mergekit's; with notes on what a translation decided."""
    path = local_path(path)
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
