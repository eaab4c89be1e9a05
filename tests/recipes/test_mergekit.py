import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from matsmerge import RecipeError
from matsmerge.recipes.mergekit import from_mergekit
from matsmerge.recipes.recipe import make_recipe
from matsmerge.recipes.recipe_file import read_recipes
from matsmerge.recipes.rules import check_patterns, make_rules
from matsmerge.recipes.tokenizer_spec import TokenizerSpec

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
    assert recipe.method.model_dump() == {"name": "linear", "normalize": False}
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
        "trim": "parameter", "normalize": True, "scale": 0.5, "rescale": False,
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
    assert [m.model for m in recipe.models] == ["b+owner/lora", "c"]
    assert recipe.base == "b"


def test_models_with_adapters_and_revisions() -> None:
    recipe, _ = translate(
        """
        merge_method: linear
        models:
          - model: {model: {path: owner/a, revision: v1}, lora: {path: owner/l, revision: v2}}
          - model: {model: owner/a, lora: owner/m}
        parameters: {weight: 1}
        """
    )
    assert [m.model for m in recipe.models] == ["owner/a@v1+owner/l@v2", "owner/a+owner/m"]


def test_what_mergekit_ignores_is_noted() -> None:
    recipe, notes = translate(
        """
        merge_method: task_arithmetic
        base_model: b
        models:
          - {model: b, parameters: {weight: 9}}
          - {model: a, parameters: {weight: 1, density: 0.5}, comment: mine}
        parameters: {lamda: 2, int8_mask: true}
        dtype: torch.bfloat16
        normalise: true
        """
    )
    assert [m.model for m in recipe.models] == ["a"]
    assert recipe.method.parameters == {"normalize": False, "scale": 1.0}
    assert recipe.dtype == "bfloat16"
    for text in (
        "'lamda'.*did you mean 'lambda'",
        "int8_mask",
        "density",
        "'normalise'",
        "'comment'",
    ):
        assert any(re.search(text, note) for note in notes), (text, notes)


def test_what_stands_in_the_wrong_place_is_told_where_it_belongs() -> None:
    """As notes, and beside what is wrong, which it may explain."""
    text = """
        merge_method: task_arithmetic
        base_model: b
        lambda: 2
        models: [{model: a, weight: 1}]
        parameters: {dtype: float16, WEIGHT}
        """
    expected = [
        "mergekit ignores the key 'lambda'; it belongs under 'parameters'",
        "models: a: mergekit ignores the key 'weight'; it belongs under 'parameters'",
        "mergekit ignores the parameter 'dtype' for task_arithmetic; it belongs beside 'merge_method'",
    ]
    assert translate(text.replace("WEIGHT", "weight: 1"))[1] == expected
    with pytest.raises(RecipeError) as error:
        translate(text.replace(", WEIGHT", ""))
    assert "needs a 'weight' for every parameter of a" in error.value.problems[0]
    assert error.value.problems[1:] == expected


def test_slices_become_a_stack() -> None:
    recipe, _ = translate(
        """
        merge_method: ties
        base_model: base
        slices:
          - sources:
              - {model: a, layer_range: [0, 2], parameters: {weight: [1, 0]}}
              - {model: base, layer_range: [0, 2]}
          - sources: [{model: a, layer_range: [1, 4]}]
            merge_method: passthrough
            parameters: {scale: [{filter: o_proj, value: 0}, {value: 0.5}]}
          - sources:
              - {model: a, layer_range: [3, 4]}
              - {model: c, layer_range: [3, 4]}
            base_model: c
            parameters: {weight: 2, density: 0.3}
        """
    )
    assert [m.name for m in recipe.models] == ["c", "a"]
    (stack,) = recipe.stack
    assert stack.num_layers == 6
    assert [stack.models_at(i) for i in range(3)] == [("a",), ("a",), ("a",)]
    assert [stack.base_at(i) for i in range(3)] == [("base", 0), ("base", 1), ("c", 3)]
    names = ["embed", *(f"layers.{i}.{p}" for i in range(6) for p in ("mlp", "o_proj")), "norm"]
    taking = dict.fromkeys(names, ("a",))
    found = make_rules(recipe, names, taking)
    assert {n: found[n].method.name for n in names if "mlp" in n or "layers" not in n} == {
        "embed": "ties", "layers.0.mlp": "ties", "layers.1.mlp": "ties",
        "layers.2.mlp": "passthrough", "layers.3.mlp": "passthrough",
        "layers.4.mlp": "passthrough", "layers.5.mlp": "ties", "norm": "ties",
    }  # fmt: skip
    weights = [found[n].weights[0] for n in ("embed", "layers.0.mlp", "layers.1.mlp", "norm")]
    assert weights == [1, 1, 0, 2]
    assert [shares.density for shares in found["layers.5.mlp"].shares] == [0.3]
    scales = [found[f"layers.3.{p}"].method.model_dump()["scale"] for p in ("mlp", "o_proj")]
    assert scales == [0.5, 0]


def test_modules_become_overrides() -> None:
    recipe, notes = translate(
        """
        merge_method: linear
        modules:
          text_decoder:
            models:
              - {model: a, parameters: {weight: [{filter: mlp, value: 3}, {value: 1}]}}
              - {model: b, parameters: {weight: 1}}
          vision_tower:
            models: [{model: b}]
            parameters: {weight: 1}
        """
    )
    names = [
        "language_model.layers.0.mlp.w", "language_model.layers.0.attn.w",
        "vision_tower.layers.0.mlp.w", "projector.w",
    ]  # fmt: skip
    found = [make_rules(recipe, names)[name] for name in names]
    assert [rule.models for rule in found] == [("a", "b"), ("a", "b"), ("b",), ("a", "b")]
    assert [rule.weights for rule in found[:3]] == [(3, 1), (1, 1), (1,)]
    assert found[3].method.only_model == "a"
    assert any("in no module" in note for note in notes)
    # Of the names a module may have, one is enough; a module that is not there is an error.
    assert check_patterns(recipe, names) == []
    with pytest.raises(RecipeError, match=r"'\*vision_tower\*' matches no parameter"):
        check_patterns(recipe, names[:2])


@pytest.mark.parametrize("base", ["", "base_model: c"])
def test_modules_that_are_taken_as_they_are(base: str) -> None:
    """Each from its own model, and not from the one of what is in no module."""
    recipe, _ = translate(
        f"""
        merge_method: passthrough
        {base}
        modules:
          text_decoder: {{models: [{{model: b, parameters: {{scale: [{{filter: w, value: 2}}]}}}}]}}
          vision_tower: {{models: [{{model: a}}]}}
        """
    )
    names = ["language_model.layers.0.w", "vision_tower.layers.0.w", "projector.w"]
    found = [make_rules(recipe, names)[name].method.model_dump() for name in names]
    assert [method["model"] for method in found] == ["b", "a", "base" if base else "b"]
    assert [method["scale"] for method in found] == [2, 1, 1]


@pytest.mark.parametrize(
    "models",
    [
        "models: [{model: x/a+y/lora, parameters: {weight: 1.0}}]",
        "slices: [{sources: [{model: x/a+y/lora, layer_range: [0, 8], parameters: {weight: 1.0}}]}]",
        "slices: [{sources: [{model: x/a+y/lora, layer_range: [0, 4]}]}, {sources: [{model: x/b, "
        "layer_range: [0, 4], parameters: {weight: 1}}]}]",
    ],
)
def test_nothing_is_merged_into_the_base(models: str) -> None:
    """As on many cards, which fold an adapter into a model so."""
    recipe, notes = translate(
        f"""
        base_model: x/a+y/lora
        merge_method: task_arithmetic
        parameters: {{normalize: false}}
        {models}
        """
    )
    assert recipe.method.name == "passthrough"
    assert recipe.models[0].model == "x/a+y/lora"
    assert notes == ["no model is merged into x/a+y/lora, which is taken as it is"]


def test_models_whose_filters_have_another_order() -> None:
    recipe, _ = translate(
        """
        merge_method: linear
        models:
          - {model: a, parameters: {weight: [{filter: mlp, value: 1}, {filter: w, value: 2}, {value: 3}]}}
          - {model: b, parameters: {weight: [{filter: w, value: 4}, {filter: mlp, value: 5}, {value: 6}]}}
        """
    )
    assert make_rules(recipe, NAMES)["layers.0.mlp.w"].weights == (1, 4)
    assert make_rules(recipe, NAMES)["embed"].weights == (3, 6)


def test_a_base_that_linear_counts_as_a_model() -> None:
    recipe, _ = translate(
        "{merge_method: linear, base_model: b, models: [{model: a}], parameters: {weight: 1}}"
    )
    assert [m.model for m in recipe.models] == ["a", "b"]


def test_a_tokenizer_as_earlier_versions_named_it() -> None:
    text = "{merge_method: passthrough, models: [{model: o/a}], tokenizer_source: 'model:o/a'}"
    recipe, _ = from_mergekit(yaml.safe_load(text))
    assert make_recipe(recipe).tokenizer == TokenizerSpec(source="o/a")


def test_yaml_with_anchors_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yml"
    lines = ["---", "half: &half {weight: 0.5, density: 0.5}", "models:", "  - model: a"]
    lines += ["    parameters: *half", "  - model: b", "    parameters: {<<: *half, density: 0.7}"]
    lines += ["merge_method: ties", "base_model: base", "parameters:", "tokenizer_source:", "..."]
    path.write_bytes("\r\n".join(lines).encode())
    (recipe,), notes = read_recipes(path)
    assert [(m.weight, m.density) for m in recipe.models] == [(0.5, 0.5), (0.5, 0.7)]
    assert recipe.tokenizer is None
    assert any("ignores the key 'half'" in note for note in notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{merge_method: nearest, models: [{model: a}]}", "merge_method 'nearest' is not supported"),
        ("{merge_method: linear, slices: []}", "one of models, slices, modules, found none"),
        ("{merge_method: linear, models: [{model: a}], slices: [{}]}", "found models, slices"),
        ("{merge_method: linear, models: 3}", "'models' must be a list"),
        ("{merge_method: linear, models: [{model: a, parameters: 3}]}", "expected a mapping"),
        ("{merge_method: linear, models: [{model: a, parameters: {weight: 1}}], base_model: b}", "'weight' .* of b"),
        ("{merge_method: linear, models: [{model: 3}]}", "expected the name of a model"),
        ("{merge_method: linear, models: [{model: {lora: x}}]}", "expected the name of a model"),
        ("{merge_method: slerp, models: [{model: a}, {model: b}], parameters: {t: 1}}", "base_model"),
        ("{merge_method: slerp, models: [{model: a}, {model: b}], base_model: a}", "needs a 't'"),
        ("{merge_method: slerp, models: [{model: b}], base_model: a, parameters: {t: x}}", "numbers"),
        ("{merge_method: slerp, models: [{model: b}], base_model: a, parameters: {t: [{filter: x, value: 1}]}}", "'t' for every"),
        ("{merge_method: linear, models: [{model: a}]}", "needs a 'weight'"),
        ("{merge_method: [linear], models: [{model: a}]}", "is not supported"),
        ("{merge_method: ties, base_model: c, models: [{model: a, parameters: {weight: [{val: 1}]}}]}", "'value'"),
        ("{merge_method: passthrough, slices: [{sources: [{model: a, layer_range: [2, 1]}]}]}", "FIRST, LAST"),
        ("{merge_method: linear, slices: [{sources: [{model: a, layer_range: [0, 1]}, {model: a, layer_range: [1, 2]}]}], parameters: {weight: 1}}", "a document of its own"),
        ("{merge_method: passthrough, slices: [{sources: [{model: a}]}]}", "slices.0: expected layer_range"),
        ("{merge_method: passthrough, slices: [{sources: [{model: a, layer_range: [1, 3], parameters: {scale: [{filter: layers.1., value: 2}]}}]}]}", "names a layer"),
        ("{merge_method: linear, modules: {x: {models: [{model: a}]}, x.y: {models: [{model: a}]}}, parameters: {weight: 1}}", "overlap"),
        ("{merge_method: model_stock, models: [{model: a}], base_model: a}", "no model besides the base a"),
        ("{merge_method: linear, models: [{model: a}, {model: b}, {model: a}], parameters: {weight: 1}}", "a is given 2 times"),
        ("{merge_method: passthrough, models: [{model: a}, {model: b}]}", "takes one model as it is, found a, b"),
        ("{merge_method: linear, modules: {x: {}}}", "either models or slices"),
        ("{merge_method: linear, models: [{model: a}], parameters: {weight: 1}, tokenizer: {}, tokenizer_source: base}", "say the same"),
    ],
)  # fmt: skip
def test_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        from_mergekit(yaml.safe_load(text))
    assert any(re.search(message, problem) for problem in error.value.problems), (
        error.value.problems
    )


def test_without_a_dtype_the_widest_is_written() -> None:
    text = "{merge_method: linear, models: [{model: a}], parameters: {weight: 1}DTYPE}"
    assert translate(text.replace("DTYPE", ""))[0].dtype == "widest"
    assert translate(text.replace("DTYPE", ", dtype: null, out_dtype: "))[0].dtype == "widest"
    assert translate(text.replace("DTYPE", ", dtype: float16"))[0].dtype == "float16"


def test_a_list_that_is_none_is_the_only_problem() -> None:
    with pytest.raises(RecipeError) as error:
        from_mergekit(yaml.safe_load("{merge_method: linear, models: [a, b]}"))
    assert len(error.value.problems) == 1
