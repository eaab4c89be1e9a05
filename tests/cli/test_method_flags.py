"""Flags that are made from the fields of methods, and `--set`."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import matsmerge
from matsmerge import RecipeError
from matsmerge.cli import merge_command
from matsmerge.cli.method_flags import made_params, parse_method
from matsmerge.methods import METHODS
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.methods.solvers import SOLVERS

Run = Callable[..., tuple[int, str, str]]
State = dict[str, Tensor]


def test_every_option_has_a_flag_with_its_description() -> None:
    flags = {param.name: param for param in made_params()}
    for table in (METHODS, OBJECTIVES, SOLVERS):
        for owner, cls in table.items():
            for name, field in cls.model_fields.items():
                if name == "stages":  # more than a value
                    assert name not in flags
                else:
                    assert field.description, (owner, name)
                    assert flags[name].help
    assert flags["scale"].opts == ["--scale"]
    assert flags["off_diagonal"].opts == ["--off-diagonal"]
    assert flags["bias"].secondary_opts == ["--no-bias"]
    assert "(ties, dare_linear, dare_ties, breadcrumbs, " in flags["density"].help
    assert all(name in flags["method"].help for name in METHODS)
    assert all(name in flags["objective"].help for name in OBJECTIVES)


def test_no_option_has_the_name_of_something_else() -> None:
    """Its flag would be left out, and from Python it would never reach the method."""
    functions = (merge_command.merge, matsmerge.merge, matsmerge.plan)
    taken = {name for function in functions for name in signature(function).parameters}
    options = {
        name
        for table in (METHODS, OBJECTIVES, SOLVERS)
        for cls in table.values()
        for name in cls.model_fields
    }
    assert options & taken <= {"model"}  # of passthrough, which is for overrides


@pytest.mark.parametrize(
    ("flags", "assignments", "method"),
    [
        ({"method": "ties", "scale": "0.5", "trim": None}, [], {"name": "ties", "scale": 0.5}),
        ({"from_init": ("a", "b"), "names": ()}, [], {"from_init": "a,b"}),
        ({"bias": False}, ["iterations=7"], {"bias": False, "iterations": 7}),
        ({"scale": "0.5"}, ["scale=1e-3"], {"scale": "1e-3"}),
        ({}, ["scale=[0.1, 0.5]"], {"scale": [0.1, 0.5]}),
        ({"from_init": "a,b"}, [], {"from_init": "a,b"}),
        ({}, ["objective.ridge=0.1", "objective.bias=true"],
         {"objective": {"ridge": 0.1, "bias": True}}),
        ({"objective": "kfac"}, ["objective.ridge=0.1"],
         {"objective": {"name": "kfac", "ridge": 0.1}}),
        ({}, ["init.init=ties", "init.init.density=0.1"],
         {"init": {"init": {"name": "ties", "density": 0.1}}}),
        ({}, ["name=mats", "stages=[{objective: gram}]"],
         {"name": "mats", "stages": [{"objective": "gram"}]}),
    ],
)  # fmt: skip
def test_methods(flags: dict[str, Any], assignments: list[str], method: dict[str, Any]) -> None:
    assert parse_method(flags, assignments) == method


@pytest.mark.parametrize("text", ["scale", "=1", ".x=1", "a..b=1", "", "a.=2"])
def test_what_is_no_assignment(text: str) -> None:
    with pytest.raises(RecipeError, match="expected NAME=VALUE"):
        parse_method({}, [text])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "ties", "--set", "densty=1"], "'densty'; did you mean 'density'?"),
        (["--method", "ties", "--set", "density=7"], "ties.density: input should be less than"),
        (["--method", "ties", "--density", "much"], "density: .*valid number.* found 'much'"),
        (["--method", "mats", "--set", "objective.rigde=1"], "'rigde'; did you mean 'ridge'?"),
        (["--method", "mats", "--set", "objektive.ridge=1"], "did you mean 'objective'?"),
        (["--set", "objective=grm"], "unknown objective 'grm'; did you mean 'gram'?"),
        (["--objective", "gram", "--set", "objective.name=3"], "unknown objective '3'"),
        (["--method", "ties", "--set", "scale=[1,"], "--set scale: not valid YAML"),
        (["--method", "ties", "--scale", "[1,"], "--scale: not valid YAML"),
        (["--method", "ties", "--iteratons", "5"], "No such option: --iteratons"),
    ],
)
def test_errors(
    mats: Run,
    make_state: Callable[..., State],
    save_model: Callable[..., Path],
    options: list[str],
    message: str,
) -> None:
    import re

    base, model = (save_model(f"m{i}", make_state(i)) for i in range(2))
    code, _, error = mats("merge", *options, "--base", base, "--model", model, "--dry-run")
    assert code == 1, error
    assert re.search(message, " ".join(error.split())), error


def test_flags_and_settings_are_the_same(
    mats: Run, make_state: Callable[..., State], save_model: Callable[..., Path]
) -> None:
    base, model = (save_model(f"m{i}", make_state(i)) for i in range(2))
    given = ["--base", base, "--model", model, "--dry-run", "--max-memory", "1GB"]
    flag = mats("merge", "--method", "ties", "--scale", 0.5, "--no-normalize", *given)
    by_name = mats("merge", "--set", "name=ties", "--set", "scale=0.5", "--set",
                   "normalize=no", *given)  # fmt: skip
    assert flag == by_name
    assert "ties(scale=0.5, normalize=False)" in flag[1]
    over_depth = mats("merge", "--method", "ties", "--scale", "[0.1, 0.5]", *given)
    assert over_depth[0] == 0
    assert "scale=0.1" in over_depth[1]
