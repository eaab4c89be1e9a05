"""What is known of recipes without their classes, and what it is good for."""

import json
from pathlib import Path

import pytest

from matsmerge import RecipeError
from matsmerge.recipes.known_options import FILE, check_names, describe_options
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
    ],
)
def test_names_are_refused_as_by_the_whole_check(
    tmp_path: Path, text: str, problems: list[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as early:
        check_names(path)
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
    ],
)
def test_what_it_leaves_to_the_whole_check(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    check_names(tmp_path / "recipe.yaml")


def test_folders_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is a folder, not a recipe"):
        check_names(tmp_path)
    with pytest.raises(RecipeError, match="No such file"):
        check_names(tmp_path / "gone.yaml")
