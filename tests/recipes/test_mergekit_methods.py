"""Every method of mergekit, translated; and what of slices, modules and parameters is refused."""

from typing import Any

import pytest

from matsmerge import RecipeError
from matsmerge.methods import METHODS
from matsmerge.recipes.mergekit import from_mergekit
from matsmerge.recipes.mergekit_methods import (
    MERGEKIT_METHODS,
    REQUIRED,
    added_options,
    find_method,
    is_unused,
    our_name,
)
from matsmerge.recipes.recipe import make_recipe


def minimal(kind: str) -> dict[str, Any]:
    """As little as mergekit needs to be told of a method."""
    known = MERGEKIT_METHODS[kind]
    base = {"base_model": "base"} if known.base == "required" else {}
    models = ["a"] if kind in ("slerp", "nearswap", "arcee_fusion") else ["a", "b"]
    if kind == "passthrough":
        models = ["a"]
    needed = {k: 0.5 for k, v in (*known.shared.items(), *known.own.items()) if v is REQUIRED}
    entries = [{"model": model} for model in models]
    return {"merge_method": kind, "models": entries, "parameters": needed, **base}


@pytest.mark.parametrize("kind", MERGEKIT_METHODS)
def test_each_method_has_one_of_ours(kind: str) -> None:
    data, notes = from_mergekit(minimal(kind))
    assert notes == []
    recipe = make_recipe(data)
    _, ours = find_method(kind)
    assert recipe.method.name == ours.name
    assert METHODS[ours.name] is ours
    recipe.method.at_depth(0)


@pytest.mark.parametrize("kind", MERGEKIT_METHODS)
def test_parameters_have_a_name_here_or_change_nothing(kind: str) -> None:
    known, ours = find_method(kind)
    for key in (*known.shared, *known.own):
        is_share = key in ("weight", "density", "gamma", "epsilon")
        is_arc = kind == "slerp" and key == "t"
        assert is_share or is_arc or is_unused(kind, key) or our_name(ours, key), key
    assert added_options(ours).keys() <= ours.model_fields.keys()


@pytest.mark.parametrize("kind", MERGEKIT_METHODS)
def test_a_base_that_must_be_given(kind: str) -> None:
    data = minimal(kind)
    if data.pop("base_model", None) is None:
        return
    with pytest.raises(RecipeError, match=f"mergekit's {kind} needs 'base_model'"):
        from_mergekit(data)


@pytest.mark.parametrize("kind", ["linear", "ties", "slerp", "sce", "ramplus_tl"])
def test_parameters_that_mergekit_does_not_know(kind: str) -> None:
    data = minimal(kind)
    data["parameters"] = {**data["parameters"], "wieght": 3, "mood": "good"}
    _, notes = from_mergekit(data)
    assert any("mergekit ignores the parameter 'wieght' for" in note for note in notes)
    assert any(f"mergekit ignores the parameter 'mood' for {kind}" in note for note in notes)


def test_settings_that_are_one_for_all_here() -> None:
    """Each model may have a scale of its own in mergekit's passthrough."""
    data = {
        "merge_method": "passthrough",
        "slices": [
            {"sources": [{"model": "a", "layer_range": [0, 2], "parameters": {"scale": 2}}]},
            {"sources": [{"model": "a", "layer_range": [2, 4], "parameters": {"scale": 3}}]},
        ],
    }
    recipe = make_recipe(from_mergekit(data)[0])
    assert [o.method["scale"] for o in recipe.overrides if o.method and o.layers != "before"]


def sliced(*slices: Any, kind: str = "linear", **more: Any) -> dict[str, Any]:
    return {"merge_method": kind, "slices": list(slices), "parameters": {"weight": 1}, **more}


def source(model: str, first: int, last: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "layer_range": [first, last], **more}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            sliced({"sources": [source("a", 0, 2), source("a", 2, 4)]}),
            "slices: a, a: a model is given twice",
        ),
        (
            sliced({"sources": [source("b", 0, 2)]}, kind="model_stock", base_model="b"),
            "slices: b: there is no model besides the base",
        ),
        (
            sliced(
                {"sources": [source("a", 0, 2)], "base_model": "c"}, kind="ties", base_model="b"
            ),
            "slices: list the base c among the sources",
        ),
        (sliced({"sources": 3}), "'slices.0.sources' must be a list of mappings"),
        (sliced({"sources": []}, {"sources": [{"model": "a"}]}), "slices.1: expected layer_range"),
        ({"merge_method": "linear", "slices": "all"}, "'slices' must be a list of mappings"),
        ({"merge_method": "linear", "modules": [1]}, "modules: expected a mapping, found [1]"),
        (
            {"merge_method": "linear", "modules": {"x": {"models": [{"model": "a"}], "slices": [1]}}},
            "modules.x: expected either models or slices",
        ),
        ({"merge_method": "linear", "models": [{"model": "a"}], "parameters": 3}, "parameters: expected a mapping"),
        ({"merge_method": "tise", "models": [{"model": "a"}]}, "merge_method 'tise' is not supported"),
    ],
)  # fmt: skip
def test_what_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        from_mergekit(data)
    assert any(message in problem for problem in error.value.problems), error.value.problems


def test_keys_of_slices_that_are_ignored() -> None:
    _, notes = from_mergekit(
        sliced({"sources": [source("a", 0, 2, layers=3)], "sources_": 1}, kind="passthrough")
    )
    assert any("slices.0: mergekit ignores the key 'sources_'" in note for note in notes)
    assert any("slices.0: a: mergekit ignores the key 'layers'" in note for note in notes)


def test_everything_that_is_wrong_is_said_once() -> None:
    data = sliced({"sources": [{"model": "a"}]}, {"sources": [{"model": 3}]})
    with pytest.raises(RecipeError) as error:
        from_mergekit(data)
    found = error.value.problems
    assert len(found) == len(set(found)) == 3


def test_modules_of_slices() -> None:
    """A stack for each module; what is in no module is taken from the base."""
    data = {
        "merge_method": "passthrough",
        "base_model": "b",
        "modules": {
            "text_decoder": {
                "slices": [{"sources": [source("a", 0, 2)]}, {"sources": [source("a", 1, 3)]}]
            }
        },
    }
    recipe, notes = from_mergekit(data)
    assert recipe["method"] == {"name": "passthrough", "model": "base"}
    assert notes == ["what is in no module is taken from b"]
    (stack,) = make_recipe(recipe).stack
    assert "model.layers.*" in stack.match
    assert stack.num_layers == 4


def test_what_stands_beside_the_weights() -> None:
    data = minimal("linear") | {
        "dtype": "float32",
        "out_dtype": "torch.float16",
        "name": 7,
        "chat_template": "chatml",
        "tokenizer_source": "union",
    }
    recipe, notes = from_mergekit(data)
    assert notes == []
    assert recipe["dtype"] == "float16"
    assert recipe["name"] == "7"
    assert recipe["chat_template"] == "chatml"
    assert recipe["tokenizer"] == {"source": "union"}
