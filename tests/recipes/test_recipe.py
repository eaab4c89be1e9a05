from pathlib import Path
from typing import Any

import pytest

from matsmerge import RecipeError
from matsmerge.methods import METHODS
from matsmerge.methods.mats import Mats
from matsmerge.methods.objectives.kfac import Kfac
from matsmerge.methods.ties import Ties
from matsmerge.recipes import method_spec
from matsmerge.recipes.method_spec import MethodSpec
from matsmerge.recipes.recipe import make_recipe, short_names
from matsmerge.recipes.recipe_file import read_recipe

GOOD: dict[str, Any] = {"models": ["a", "b"], "base": "c", "method": "ties"}


def problems(data: dict[str, Any]) -> list[str]:
    with pytest.raises(RecipeError) as error:
        make_recipe(data)
    return error.value.problems


def test_short_and_long_forms_are_the_same() -> None:
    short = make_recipe(GOOD | {"heads": "classifier.*"})
    long = make_recipe(
        {
            "models": [{"model": "a", "weight": 1}, {"model": "b", "name": "b"}],
            "base": "c",
            "method": {"name": "ties"},
            "heads": ["classifier.*"],
            "overrides": [],
        }
    )
    assert short == long
    assert make_recipe(short.model_dump(mode="json", exclude_defaults=True)) == short


def test_a_method_may_be_an_object() -> None:
    recipe = make_recipe(GOOD | {"method": Mats(init=Ties(density=0.1), objective=Kfac())})
    assert recipe.method.at_depth(0) == Mats(init=Ties(density=0.1), objective=Kfac())
    assert make_recipe(recipe.model_dump(mode="json")) == recipe


def test_a_method_is_made_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_spec, "_methods", None)
    method = make_recipe(GOOD | {"method": {"name": "ties", "density": [0.2, 0.4]}}).method
    assert method.at_depth(0.5) == Ties(density=0.2 + 0.5 * (0.4 - 0.2))


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_alone_is_the_one_among_all(name: str) -> None:
    options: dict[str, dict[str, Any]] = {"passthrough": {"model": "a"}, "nearswap": {"t": [0, 1]}}
    spec = MethodSpec.model_validate({"name": name, **options.get(name, {})})
    among_all = method_spec._methods().validate_python(spec.written, context={"depth": 0.5})
    assert spec.at_depth(0.5) == among_all
    assert type(among_all) is METHODS[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methud": "ties"}, "unknown key 'methud'; did you mean 'method'?"),
        ({"method": "tise"}, "method: unknown method 'tise'; did you mean 'ties'?"),
        ({"method": "xyz"}, "unknown method 'xyz'; there is average, task_arithmetic"),
        ({"method": {"name": "ties", "densty": 1}}, "'densty'; did you mean 'density'?"),
        ({"method": {"name": "ties", "density": 0}}, "density: input should be greater than 0"),
        ({"method": {"name": "ties", "density": [0.5, 2]}}, "density: .* found 2"),
        ({"method": {"name": "ties", "trim": "globl"}}, "trim: .*'global' or 'parameter'"),
        ({"method": {"name": "ties", "scale": "much"}}, "scale: .*valid number.* found 'much'"),
        ({"method": {"name": "slerp", "t": 0.3}}, "weights say where to stop"),
        ({"method": {"name": "ties", "weight": 2}}, "weights belong to the models"),
        ({"method": {"name": "passthrough"}}, "say which with model"),
        ({"method": {"name": "passthrough", "model": "z"}}, "no model 'z'; there is a, b"),
        ({"models": []}, "models: list should have at least 1 item"),
        ({"models": ["a", "a"]}, "the model a is given twice"),
        ({"models": ["a", "c"]}, "c is both a model and the base"),
        ({"models": ["a", {"model": "b", "wieght": 1}]}, "models.1: unknown key 'wieght'; did you"),
        ({"models": ["a", {"model": "b", "weight": "x"}]}, "models.1.weight.*found 'x'"),
        ({"models": [{"model": "a", "name": "x"}, {"model": "b", "name": "x"}]}, "'x' is taken"),
        ({"models": [{"model": "a", "name": "base"}]}, "'base' is taken"),
        ({"models": [{"model": "a", "name": "../x"}]}, "name.*pattern"),
        ({"models": "a"}, "models: input should be a valid list"),
        ({"output": "lora"}, "output: input should be 'dense' or 'adapter'"),
        ({"rank": 0}, "rank: expected a number from 1 to 1000000, or concatenate, found 0"),
        (
            {"rank": "many"},
            "rank: expected a number from 1 to 1000000, or concatenate, found 'many'",
        ),
        ({"align": "svd"}, "align: input should be 'knots' or 'core_space'"),
        ({"method": "slerp", "models": ["a", "b", "d"]}, "merges exactly 2 models, 3 given"),
        (
            {"method": "arcee_fusion", "base": "b", "models": ["a", "d"]},
            "merges exactly 1 model besides the base, 2 given",
        ),
        ({"method": "average", "models": [{"model": "a", "density": 0.5}]}, "has no density"),
        ({"dtype": "bf16"}, "dtype: input should be .*'bfloat16'"),
        ({"overrides": [{"match": "x", "models": {"z": {"weight": 1}}}]}, "there is no model 'z'"),
        ({"overrides": [{"match": "x", "models": {"a": {"wait": 1}}}]}, "'wait'.*weight"),
        ({"overrides": [{"match": []}]}, "overrides.0.match"),
        ({"overrides": [{"match": "*"}]}, "overrides.0: changes nothing"),
        ({"models": ["a", {"model": "b", "weight": float("nan")}]}, "weight.*finite number"),
        (
            {"method": {"name": "ties", "trim": ["global", "parameter"]}},
            "trim: input should be 'global' or 'parameter', found",
        ),
        (
            {"method": "average", "overrides": [{"match": "x", "models": {"a": {"density": 0.1}}}]},
            "has no density, the override",
        ),
        ({"overrides": [{"match": "x", "method": "tise"}]}, "unknown method 'tise'"),
        ({"overrides": [{"match": "x", "method": {"scal": 1}}]}, "'scal'; did you mean 'scale'?"),
    ],
)
def test_what_is_wrong_and_what_was_meant(change: dict[str, Any], message: str) -> None:
    import re

    found = problems(GOOD | change)
    assert any(re.search(message, problem) for problem in found), found


def test_all_problems_at_once() -> None:
    found = problems({"models": [{"modle": "a"}], "method": "tise", "dtyp": "x"})
    assert len(found) == 4


def test_names_tell_models_apart() -> None:
    assert short_names(["x/a", "y/b/"]) == ["a", "b"]
    assert short_names(["x/checkpoint-5", "y/checkpoint-5"]) == ["x-checkpoint-5", "y-checkpoint-5"]
    assert short_names(["owner/name@rev"]) == ["name-rev"]
    assert short_names(["x/base", "x/b"]) == ["x-base", "x-b"]
    assert short_names(["a b/ü?"]) == ["ü"]
    assert short_names(["/", "/"]) == ["model_0", "model_1"]
    assert short_names(["x/a"], taken=["a"]) == ["x-a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [a]\nmethod: average\nmethod: ties\n", "the key 'method' is given twice"),
        ("models: [a\n", "not valid YAML"),
        ("- a\n", "expected a mapping"),
        ("models: [a]\nmethod: tise\n", "did you mean 'ties'"),
        ("models: [!!python/object/apply:os.system ['true']]\nmethod: average", "not valid YAML"),
        ("models: !!set {a, b}\nmethod: average\n", "'!!set': expected text"),
        ("models: [a, b]\nmethod: {name: ties, scale: 2020-01-01}\n", "scale.*2020-01-01"),
        ("models: [a, b]\nmethod: 2020-99-99\n", "2020-99-99"),
        ("models: [a, b]\nmethod: 0x_\n", "'0x_' is no valid int"),
        ("\x00", "not valid YAML"),
        ("? [a, b]\n: 1\n", "not valid YAML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message) as error:
        read_recipe(path)
    assert "r.yaml" in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="No such file"):
        read_recipe(tmp_path / "gone.yaml")


def test_numbers_as_yaml_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    for text in ("1e-3", "[1e-3, 0.5]"):
        path.write_text(f"models: [a]\nbase: b\nmethod: {{name: task_arithmetic, scale: {text}}}\n")
        recipe, _ = read_recipe(path)
        assert recipe.method.at_depth(0).model_dump()["scale"] == 1e-3
