"""Recipes from files: ours, and mergekit's."""

from pathlib import Path

from matsmerge.problems import reworded
from matsmerge.recipes.known_options import read_written
from matsmerge.recipes.mergekit import from_mergekit
from matsmerge.recipes.recipe import Recipe, make_recipe


def read_recipe(path: Path) -> tuple[Recipe, list[str]]:
    """Read a recipe file, ours or mergekit's; with notes on what a translation decided."""
    data = read_written(path)
    notes: list[str] = []
    with reworded(before=f"{path}: "):
        if "merge_method" in data:
            data, notes = from_mergekit(data)
        return make_recipe(data), notes
