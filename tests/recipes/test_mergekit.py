import re
from typing import Any

import pytest
import yaml

from matsmerge import RecipeError
from matsmerge.recipes.mergekit import from_mergekit
from matsmerge.recipes.recipe import make_recipe
from matsmerge.recipes.rules import make_rules

NAMES = ["embed", "layers.0.mlp.w", "layers.0.self_attn.w", "layers.2.mlp.w", "norm"]


def translate(text: str) -> tuple[Any, list[str]]:
    data, notes = from_mergekit(yaml.safe_load(text))
    recipe = make_recipe(data)
    return recipe, notes


def test_linear() -> None:
    recipe, _ = translate(
        """
        merge_method: linear
        models:
          - {model: x/a, parameters: {weight: 0.25}}
          - {model: x/b, parameters: {weight: 0.75}}
        parameters: {normalize: false}
        dtype: float16
        out_dtype: bfloat16
        """
    )
    assert recipe.method.model_dump() == {"name": "average", "normalize": False}
    assert [(m.model, m.weight) for m in recipe.models] == [("x/a", 0.25), ("x/b", 0.75)]
    assert recipe.dtype == "bfloat16"


def test_ties_with_the_base_among_the_models() -> None:
    recipe, notes = translate(
        """
        merge_method: ties
        base_model: owner/base
        models:
          - model: owner/base
          - {model: owner/a, parameters: {density: 0.5, weight: 1}}
          - {model: owner/b@v2, parameters: {density: [1, 0.5, 0.1], weight: [0, 1]}}
        parameters: {normalize: true, int8_mask: true, lambda: 0.5}
        dtype: bfloat16
        """
    )
    assert recipe.base == "owner/base"
    assert [m.name for m in recipe.models] == ["a", "b-v2"]
    assert recipe.method.name == "ties"
    assert recipe.method.parameters == {
        "trim": "parameter", "density": 1.0, "normalize": True, "scale": 0.5,
    }  # fmt: skip
    assert recipe.models[1].density == [1, 0.5, 0.1]
    assert "int8_mask" in notes[0]


def test_filters_and_gradients() -> None:
    recipe, _ = translate(
        """
        merge_method: task_arithmetic
        base_model: base
        models:
          - model: a
            parameters:
              weight:
                - {filter: mlp, value: [1, 0]}
                - {filter: self_attn, value: 0.25}
                - {value: 0.5}
                - {filter: mlp, value: 99}
          - model: b
            parameters: {weight: [{filter: mlp, value: 3}]}
        parameters:
          weight: [{filter: embed, value: 5}, {value: 2}]
          lambda: [{filter: "*", value: 0.1}]
        """
    )
    rules = make_rules(recipe, NAMES)
    assert [rules[n].weights for n in NAMES] == [
        (0.5, 5), (1, 3), (0.25, 2), (0, 3), (0.5, 2),
    ]  # fmt: skip
    assert all(rules[n].method.model_dump()["scale"] == 0.1 for n in NAMES)


@pytest.mark.parametrize(
    "models", ["[{model: a}, {model: b}]", "[{model: b}]", "[{model: b}, {model: a}]"]
)
def test_slerp(models: str) -> None:
    recipe, _ = translate(
        f"""
        merge_method: slerp
        base_model: a
        models: {models}
        parameters:
          t: [{{filter: self_attn, value: [0, 1]}}, {{value: 0.3}}]
        """
    )
    weights = {m.name: m.weight for m in recipe.models}
    assert weights == {"a": 0.7, "b": 0.3}
    rules = make_rules(recipe, NAMES)
    names = [m.name for m in recipe.models]
    assert dict(zip(names, rules["layers.0.self_attn.w"].weights, strict=True)) == {"a": 1, "b": 0}


def test_dare_defaults_are_mergekits() -> None:
    for kind in ("dare_ties", "dare_linear"):
        recipe, _ = translate(
            f"{{merge_method: {kind}, base_model: b, models: [{{model: a, parameters: {{weight: 1, density: 0.4}}}}],"
            " parameters: {rescale: false}}"
        )
        method = recipe.method.at_depth(0).model_dump()
        assert (method["normalize"], method["rescale"]) == (False, False)


def test_model_references() -> None:
    recipe, _ = translate(
        """
        merge_method: linear
        models:
          - model: {model: {path: owner/a, revision: main}}
          - model: {model: {path: owner/b}}
        parameters: {weight: 1}
        """
    )
    assert [m.model for m in recipe.models] == ["owner/a@main", "owner/b"]


def test_adapters_on_the_base() -> None:
    recipe, _ = translate(
        "{merge_method: ties, base_model: b, parameters: {weight: 1, density: 0.5}, "
        "models: [{model: b+owner/lora}, {model: c}]}"
    )
    assert [m.model for m in recipe.models] == ["owner/lora", "c"]
    assert (recipe.base, recipe.output) == ("b", "dense")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("merge_method: nearswap", "merge_method 'nearswap' is not supported"),
        ("{merge_method: linear, slices: []}", "key 'slices' is not supported"),
        ("{merge_method: linear, models: [], tokenizer_source: a, tokenizer: {source: b}}", "not both"),
        ("{merge_method: linear, models: [], chat_template: auto}", "key 'chat_template'"),
        ("{merge_method: linear, models: 3}", "'models' must be a list"),
        ("{merge_method: linear, models: [{model: a, layer_range: [0, 1]}]}", "'layer_range'"),
        ("{merge_method: linear, models: [{model: a, parameters: {density: 1}}]}", "'density'"),
        ("{merge_method: linear, models: [{model: a, parameters: 3}]}", "expected a mapping"),
        ("{merge_method: linear, models: [{model: a}], parameters: {lambda: 1}}", "'lambda'"),
        ("{merge_method: linear, models: [{model: a}], parameters: {int8_mask: true}}", "'int8_mask'"),
        ("{merge_method: linear, models: [{model: a}], base_model: b}", "counts 'base_model'"),
        ("{merge_method: linear, models: [{model: a+x}, {model: b+y}]}", "adapters are on a, b"),
        ("{merge_method: linear, models: [{model: 3}]}", "expected the name of a model"),
        ("{merge_method: linear, models: [{model: {lora: x}}]}", "model reference"),
        ("{merge_method: slerp, models: [{model: a}, {model: b}], parameters: {t: 1}}", "base_model"),
        ("{merge_method: slerp, models: [{model: a}, {model: b}], base_model: a}", "parameter 't'"),
        ("{merge_method: slerp, models: [{model: b}], base_model: a, parameters: {t: x}}", "numbers"),
        ("{merge_method: slerp, models: [{model: b}], base_model: a, parameters: {t: [{filter: x, value: 1}]}}", "'t' for every"),
        ("{merge_method: linear, models: [{model: a}]}", "needs a 'weight'"),
        ("{merge_method: [linear]}", "is not supported"),
        ("{merge_method: model_stock, base_model: c, models: [{model: a}], parameters: {filter_wise: true}}", "'filter_wise'"),
        ("{merge_method: ties, base_model: c, models: [{model: a, parameters: {weight: [{val: 1}]}}]}", "'value'"),
    ],
)  # fmt: skip
def test_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        from_mergekit(yaml.safe_load(text))
    assert any(re.search(message, problem) for problem in error.value.problems), (
        error.value.problems
    )
