from typing import Any

import jsonschema
import pytest

from matsmerge import RecipeError
from matsmerge.recipes.recipe import make_recipe
from matsmerge.recipes.schema import recipe_schema

GOOD: list[dict[str, Any]] = [
    {"models": ["a"], "method": "average"},
    {"models": [{"model": "a", "weight": [0, 1], "name": "x"}], "method": {"name": "average"}},
    {
        "models": ["a", {"model": "b", "density": 0.1}],
        "base": "c",
        "method": {"name": "ties", "scale": [0.1, 0.5], "trim": "parameter"},
        "overrides": [{"match": "x", "method": {"scale": 1}, "models": {"a": {"weight": 2}}}],
        "heads": "y",
        "dtype": "bfloat16",
    },
    {"models": ["a", "b"], "method": "slerp", "heads": ["x", "y"]},
]
BAD: list[dict[str, Any]] = [
    {"models": [], "method": "average"},
    {"models": ["a"], "method": "averag"},
    {"models": ["a"], "method": {"name": "average", "scale": 1}},
    {"models": ["a"], "method": "average", "extra": 1},
    {"models": ["a"], "base": "b", "method": {"name": "ties", "density": 2}},
    {"models": ["a"], "base": "b", "method": {"name": "ties", "scale": []}},
    {"models": ["a"], "method": {"name": "passthrough"}},
    {"models": [{"model": "a", "wait": 1}], "method": "average"},
    {"models": ["a"], "method": "average", "dtype": "int8"},
    {"models": ["a"], "method": "average", "overrides": [{"method": "average"}]},
]


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(recipe_schema())


@pytest.mark.parametrize("data", GOOD)
def test_accepts_what_we_accept(data: dict[str, Any]) -> None:
    make_recipe(data)
    jsonschema.validate(data, recipe_schema())


@pytest.mark.parametrize("data", BAD)
def test_refuses_what_we_refuse(data: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        make_recipe(data)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, recipe_schema())
