"""Recipes from files: ours, and mergekit's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from matsmerge.errors import RecipeError
from matsmerge.recipes.mergekit import from_mergekit
from matsmerge.recipes.recipe import Recipe, make_recipe


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is not a name", key_node.start_mark
            )
        if key in result:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key '{key}' is given twice", key_node.start_mark
            )
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_recipe(path: Path) -> tuple[Recipe, list[str]]:
    """Read a recipe file, ours or mergekit's; with notes on what a translation decided."""
    if path.is_dir():
        raise RecipeError(f"{path}: is a folder, not a recipe; models are given with --model")
    try:
        data = yaml.load(path.read_text(), Loader=_StrictLoader)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise RecipeError(f"{path}: not valid YAML ({error})") from error
    if not isinstance(data, Mapping):
        raise RecipeError(f"{path}: expected a mapping with 'models' and 'method'")
    notes: list[str] = []
    try:
        if "merge_method" in data:
            data, notes = from_mergekit(data)
        return make_recipe(data), notes
    except RecipeError as error:
        raise RecipeError([f"{path}: {problem}" for problem in error.problems]) from error
