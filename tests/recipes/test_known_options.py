"""What is known of recipes without their classes, and what it is good for."""

import json
from pathlib import Path

import pytest

from matsmerge import RecipeError
from matsmerge.recipes.known_options import FILE, check_early, describe_options
from matsmerge.recipes.recipe_file import read_recipe


def test_the_file_is_up_to_date() -> None:
    assert json.loads(FILE.read_text()) == describe_options(), (
        "make it again: python -m matsmerge.recipes.known_options"
    )


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("models: [a", ["not valid YAML"]),
        ("- a", ["expected a mapping with 'models' and 'method'"]),
        ("models: [a]\nmethod: tise", ["method: unknown method 'tise'; did you mean 'ties'?"]),
        (
            "models: [{model: a, wieght: 2}, b]\nmethod: {name: ties}\nbsae: c\n"
            "overrides: [{match: x, mehtod: slerp, models: {a: {weight: 1}}}]",
            [
                "unknown key 'bsae'; did you mean 'base'?",
                "models.0: unknown key 'wieght'; did you mean 'weight'?",
                "overrides.0: unknown key 'mehtod'; did you mean 'method'?",
            ],
        ),
        (
            "models: [a]\nbase: b\nmethod: {name: ties, scale: much, density: 2, trim: all}",
            [
                "method: ties.scale: input should be a valid number, unable to parse string",
                "method: ties.density: input should be less than or equal to 1, found 2",
                "method: ties.trim: input should be 'global' or 'parameter', found 'all'",
            ],
        ),
        (
            "models: [a]\nmethod: {name: mats, solver: {name: cg, iterations: 1.5}}",
            ["method: mats.solver.cg.iterations: input should be a valid integer"],
        ),
        (
            "models: [a]\nbase: b\nmethod: {name: task_arithmetic, scale: [0, x]}",
            ["method: task_arithmetic.scale: input should be a valid number"],
        ),
        (
            "models: [a]\nbase: b\nmethod: {name: dare_ties, seed: -1, rescale: maybe}",
            [
                "method: dare_ties.seed: input should be greater than or equal to 0, found -1",
                "method: dare_ties.rescale: input should be a valid boolean",
            ],
        ),
    ],
)
def test_names_and_values_are_refused_as_by_the_whole_check(
    tmp_path: Path, text: str, problems: list[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as early:
        check_early(path)
    with pytest.raises(RecipeError) as late:
        read_recipe(path)
    assert set(early.value.problems) == set(late.value.problems)
    for problem, found in zip(problems, early.value.problems, strict=True):
        assert found.startswith(f"{path}: {problem}")


@pytest.mark.parametrize(
    "text",
    [
        "models: [a, {model: b, weight: 2}]\nmethod: ties\nbase: c",
        "models: [a]\nmethod: {name: mats, ridge: 0.1}\noverrides: [{match: x, method: {a: 1}}]",
        "models: 3\noverrides: [1]\nmethod: [2]",  # left to the whole check
        "merge_method: any\nslices: []",  # mergekit's
        "models: [a]\nmethod: {name: ties, scale: [0, '1'], trim: null, sacle: x}",
        "models: [a]\nmethod: {name: mats, solver: cg, objective: {name: no, x: 1}}",
    ],
)
def test_what_it_leaves_to_the_whole_check(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    check_early(tmp_path / "recipe.yaml")


def test_folders_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is a folder, not a recipe"):
        check_early(tmp_path)
    with pytest.raises(RecipeError, match="No such file"):
        check_early(tmp_path / "gone.yaml")
