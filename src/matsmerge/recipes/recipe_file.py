"""Recipes from files: ours, and mergekit's; a file may have several, which use each other."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from matsmerge.errors import RecipeError
from matsmerge.problems import noted
from matsmerge.recipes.known_options import read_written
from matsmerge.recipes.mergekit import from_mergekit
from matsmerge.recipes.recipe import Recipe, make_recipe


def read_recipe(path: str | Path) -> tuple[Recipe, list[str]]:
    """Read a file with one recipe, ours or mergekit's; with notes on what a translation decided."""
    (*others, recipe), notes = read_recipes(path)
    if others:
        raise RecipeError(
            f"{path}: has {len(others) + 1} documents; where one recipe is expected, make the "
            "others first (mats merge) and name their results"
        )
    return recipe, notes


def read_recipes(path: str | Path) -> tuple[list[Recipe], list[str]]:
    """Read all recipes of a file, in an order in which each comes after those it uses.

    The last is the file's own result: the one without a name, or the last in the file. Beside
    them, notes on what a translation decided.
    """
    recipes: list[Recipe] = []
    notes: list[str] = []
    problems: list[str] = []
    for where, data in read_written(path):
        with noted(problems, RecipeError, before=where):
            recipe, said = _read(data)
            recipes.append(recipe)
            notes += said
    if not problems:
        with noted(problems, RecipeError, before=f"{path}: "):
            recipes = _in_order(recipes)
    RecipeError.raise_all(problems)
    return recipes, list(dict.fromkeys(notes))


def _read(data: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    notes: list[str] = []
    if "merge_method" in data:
        data, notes = from_mergekit(data)
    return make_recipe(data), notes


def uses_of(recipe: Recipe, names: Sequence[str | None]) -> list[str]:
    """The other recipes, of those with these names, whose results a recipe merges."""
    given = [entry.model for entry in recipe.models] + ([recipe.base] if recipe.base else [])
    return [name for name in dict.fromkeys(g.partition("+")[0] for g in given) if name in names]


def _in_order(recipes: Sequence[Recipe]) -> list[Recipe]:
    names = [recipe.name for recipe in recipes]
    problems = [
        f"the name {n} is given twice" for n in dict.fromkeys(names) if n and names.count(n) > 1
    ]
    if names.count(None) > 1:
        problems.append("several documents have no name; one may, which is the result")
    RecipeError.raise_all(problems)
    last = names.index(None) if None in names else len(recipes) - 1
    waiting = {i: uses_of(recipe, names) for i, recipe in enumerate(recipes)}
    order: list[int] = []
    while waiting:
        done = [names[i] for i in order]
        ready = [i for i, used in waiting.items() if all(name in done for name in used)]
        # The result comes after all others, also after those it does not use.
        ready = [i for i in ready if i != last] or ([last] if [*waiting] == [last] else [])
        if not ready:
            cycle = ", ".join(str(names[i] or "the result") for i in waiting if waiting[i])
            raise RecipeError(f"documents use each other in a circle, or their own result: {cycle}")
        order.append(ready[0])
        del waiting[ready[0]]
    return [recipes[i] for i in order]


def recipe_text(recipe: Recipe) -> str:
    """A recipe as a file has it, without defaults, in the order in which one reads it."""
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    first = [key for key in ("base", "models", "method") if key in content]
    content = {key: content[key] for key in [*first, *(k for k in content if k not in first)]}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
