"""Files with several recipes: their order, what they use, and how a recipe is written."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from matsmerge import RecipeError
from matsmerge.recipes.recipe import make_recipe
from matsmerge.recipes.recipe_file import read_recipe, read_recipes, recipe_text, uses_of


def write(path: Path, *documents: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump_all(documents))
    return path


def document(name: str | None, *models: str, base: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"models": list(models), "method": "average"}
    return found | ({"name": name} if name else {}) | ({"base": base} if base else {})


def order(path: Path) -> list[str | None]:
    return [recipe.name for recipe in read_recipes(path)[0]]


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ([document("a", "x"), document("b", "a")], ["a", "b"]),
        ([document("b", "a"), document("a", "x"), document(None, "b")], ["a", "b", None]),
        ([document(None, "b"), document("a", "x"), document("b", "a")], ["a", "b", None]),
        # The result comes last, also after those that it does not use.
        ([document("a", "x"), document(None, "x"), document("b", "x")], ["a", "b", None]),
        ([document("a", "x"), document(None, "y", base="a")], ["a", None]),
        ([document("a", "x"), document(None, "a+owner/lora")], ["a", None]),
    ],
)
def test_each_comes_after_those_it_uses(
    tmp_path: Path, documents: list[dict[str, Any]], expected: list[str | None]
) -> None:
    assert order(write(tmp_path / "r.yaml", *documents)) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.permutations(range(5)), st.data())
def test_any_order_of_documents_can_be_made(
    tmp_path: Path, places: list[int], data: st.DataObject
) -> None:
    """Document i uses some before it; written down in any order they come out in a usable one."""
    used: list[set[int]] = [
        data.draw(st.sets(st.integers(0, i - 1))) if i else set() for i in range(5)
    ]
    documents = [document(f"d{i}", "x", *(f"d{j}" for j in sorted(used[i]))) for i in range(5)]
    documents.append(document(None, "x"))
    path = write(tmp_path / "r.yaml", *(documents[i] for i in [*places, 5]))
    found = order(path)
    assert found[-1] is None
    assert sorted(map(str, found[:-1])) == [f"d{i}" for i in range(5)]
    for i in range(5):
        assert all(found.index(f"d{j}") < found.index(f"d{i}") for j in used[i])


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([document("a", "x"), document("a", "y")], "r.yaml: the name a is given twice"),
        ([document(None, "x"), document(None, "y")], "several documents have no name"),
        ([document("a", "b"), document("b", "a")], "in a circle, or their own result: a, b"),
        ([document("a", "a"), document(None, "x")], "in a circle, or their own result: a"),
        ([document("a", "b"), document("b", "x"), document("b", "y")], "b is given twice"),
    ],
)
def test_what_has_no_order(tmp_path: Path, documents: list[Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        read_recipes(write(tmp_path / "r.yaml", *documents))


def test_problems_of_all_documents_at_once(tmp_path: Path) -> None:
    wrong = [document("a", "x") | {"method": "tise"}, document("b", "x") | {"dtype": "bf16"}]
    with pytest.raises(RecipeError) as error:
        read_recipes(write(tmp_path / "r.yaml", *wrong))
    assert len(error.value.problems) == 2
    assert "did you mean 'ties'" in error.value.problems[0]
    assert "dtype" in error.value.problems[1]


def test_where_one_recipe_is_expected(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", document("a", "x"), document(None, "a"))
    with pytest.raises(RecipeError, match="r.yaml: has 2 documents; where one recipe is expected"):
        read_recipe(path)
    recipe, notes = read_recipe(write(path, document("a", "x")))
    assert (recipe.name, notes) == ("a", [])


def test_experts_are_not_merged(tmp_path: Path) -> None:
    moe = {"base_model": "x", "experts": [{"source_model": "x", "positive_prompts": ["chat"]}]}
    with pytest.raises(RecipeError, match="a recipe of mergekit-moe") as error:
        read_recipes(write(tmp_path / "r.yaml", moe))
    assert len(error.value.problems) == 1
    with pytest.raises(RecipeError, match="a recipe of mergekit-moe"):
        read_recipes(write(tmp_path / "r.yaml", moe | {"merge_method": "moe"}))


def test_mergekits_yaml_without_a_method(tmp_path: Path) -> None:
    models = [{"model": "x", "parameters": {"weight": 1}}]
    with pytest.raises(RecipeError, match="says no merge_method"):
        read_recipes(write(tmp_path / "r.yaml", {"models": models}))
    with pytest.raises(RecipeError, match="says no merge_method"):
        read_recipes(write(tmp_path / "r.yaml", {"base_model": "b", "models": models}))


def test_mergekits_and_ours_in_one_file(tmp_path: Path) -> None:
    theirs = {
        "name": "a",
        "merge_method": "linear",
        "models": [{"model": "x", "parameters": {"weight": 1}}],
        "mood": "good",
    }
    path = write(tmp_path / "r.yaml", theirs, document(None, "a"))
    recipes, notes = read_recipes(path)
    assert [recipe.name for recipe in recipes] == ["a", None]
    assert any("mergekit ignores the key 'mood'" in note for note in notes)
    # Said once, however often it is so.
    again = write(path, theirs, theirs | {"name": "b"}, document(None, "a"))
    assert read_recipes(again)[1] == notes


def test_what_a_recipe_uses() -> None:
    recipe = make_recipe({"models": ["a", "b+a", "c"], "base": "d+l", "method": "task_arithmetic"})
    assert uses_of(recipe, ["a", "b", "d", "e"]) == ["a", "b", "d"]
    assert uses_of(recipe, ["l", None]) == []


@pytest.mark.parametrize(
    "data",
    [
        {"models": ["a", "b"], "method": "average"},
        {"method": {"name": "ties", "density": [0.1, 0.5]}, "models": ["ä", "b"], "base": "c"},
        {
            "dtype": "bfloat16",
            "overrides": [{"match": "*.mlp.*", "method": {"scale": 0.5}}],
            "method": "task_arithmetic",
            "models": [{"model": "a", "weight": 0.25, "name": "first"}],
            "base": "c",
        },
        {"models": ["a"], "method": "passthrough", "stack": [{"a": [0, 2]}, {"a": [1, 3]}]},
    ],
)
def test_a_recipe_as_a_file(tmp_path: Path, data: dict[str, Any]) -> None:
    """It begins with the models, has no defaults, and is the same when it is read again."""
    recipe = make_recipe(data)
    text = recipe_text(recipe)
    written = yaml.safe_load(text)
    first = ["base", "models", "method"] if "base" in data else ["models", "method"]
    assert list(written)[: len(first)] == first
    assert written.keys() == {*data}
    assert "\\x" not in text
    path = tmp_path / "r.yaml"
    path.write_text(text)
    assert read_recipe(path)[0] == recipe
