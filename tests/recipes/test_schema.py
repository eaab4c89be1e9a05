from typing import Any

import jsonschema
import pytest

from matsmerge import RecipeError
from matsmerge.methods import METHODS
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.methods.solvers import SOLVERS
from matsmerge.recipes.recipe import make_recipe, recipe_schema

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
    {
        "models": [{"model": "a", "statistics": "a.safetensors"}, "b"],
        "base": "c",
        "method": {
            "name": "mats",
            "init": "ties",
            "density": 0.1,
            "objective": "kfac",
            "bias": True,
        },
        "trajectory": [10, 20],
    },
    {
        "models": ["a", "b"],
        "base": "c",
        "method": {
            "name": "mats",
            "init": {"name": "task_arithmetic", "scale": [0.1, 0.3]},
            "stages": [
                {"objective": "gram", "iterations": 20},
                {
                    "objective": {"name": "kfac", "bias": True},
                    "solver": {"preconditioner": "jacobi"},
                },
            ],
            "otherwise": "init",
        },
    },
    {"models": ["a", "b"], "method": {"name": "regmean", "off_diagonal": 0.5}},
    {
        "models": ["a", "b"],
        "base": "c",
        "method": {
            "name": "mats",
            "init": {"name": "mats", "init": {"name": "ties", "density": 0.1}, "iterations": 3},
            "objective": {"ridge": [0.1, 0.2]},
        },
        "overrides": [{"match": "x", "method": "average"}, {"match": "y", "method": {"ridge": 0}}],
    },
]
BAD: list[dict[str, Any]] = [
    {"models": [], "method": "average"},
    {"models": ["a"], "method": "averag"},
    {"models": ["a"], "method": {"name": "average", "scale": 1}},
    {"models": ["a"], "method": "average", "extra": 1},
    {"models": ["a"], "base": "b", "method": {"name": "ties", "density": 2}},
    {"models": ["a"], "base": "b", "method": {"name": "ties", "scale": []}},
    {"models": ["a"], "method": {"name": "passthrough", "models": "a"}},
    {"models": ["a"], "method": "passthrough", "stack": [{"a": [0]}]},
    {"models": [{"model": "a", "wait": 1}], "method": "average"},
    {"models": ["a"], "method": "average", "dtype": "int8"},
    {"models": ["a"], "method": "average", "overrides": [{"method": "average"}]},
    {"models": ["a"], "base": "b", "method": {"name": "mats", "objective": "gramm"}},
    {"models": ["a"], "base": "b", "method": {"name": "mats", "iterations": -1}},
    {"models": ["a"], "base": "b", "method": {"name": "mats", "itrations": 1}},
    {
        "models": ["a"],
        "base": "b",
        "method": {"name": "mats", "solver": {"name": "cg", "steps": 1}},
    },
    {"models": ["a"], "base": "b", "method": {"name": "mats", "stages": [{"init": "average"}]}},
    {"models": ["a"], "base": "b", "method": "mats", "trajectory": [-1]},
    {"models": ["a"], "base": "b", "method": {"scale": 1}},
    {"models": ["a"], "base": "b", "method": {"name": "mats", "init": {"name": "ties", "t": 1}}},
    {"models": ["a"], "method": "average", "overrides": [{"match": "x", "method": "averag"}]},
]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return recipe_schema()


def test_it_is_a_schema(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)


def test_it_describes_every_option(schema: dict[str, Any]) -> None:
    definitions = schema["$defs"]
    for table in (METHODS, OBJECTIVES, SOLVERS):
        for name, cls in table.items():
            found = definitions[cls.__name__]
            assert found["properties"]["name"] == {"const": name}
            assert found["description"]
            for option, field in cls.model_fields.items():
                assert found["properties"][option]["description"] == field.description
    flat = definitions["MatsKfac"]["properties"]  # options of parts that are not named
    assert {"iterations", "ridge", "per", "scale", "density"} <= flat.keys()
    assert flat["objective"]["default"]["ridge"] == 0.03


@pytest.mark.parametrize("data", GOOD)
def test_accepts_what_we_accept(data: dict[str, Any], schema: dict[str, Any]) -> None:
    make_recipe(data)
    jsonschema.Draft202012Validator(schema).validate(data)


@pytest.mark.parametrize("data", BAD)
def test_refuses_what_we_refuse(data: dict[str, Any], schema: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        make_recipe(data)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(data)
