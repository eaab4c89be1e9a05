"""Recipes as mergekit's YAML: read again, it is the same merge."""

from typing import Any

import pytest
import yaml

from matsmerge.recipes.mergekit import from_mergekit
from matsmerge.recipes.mergekit_export import to_mergekit
from matsmerge.recipes.recipe import make_recipe
from matsmerge.recipes.rules import make_rules

NAMES = ["embed", *(f"layers.{i}.{p}.w" for i in range(4) for p in ("mlp", "self_attn")), "norm"]
SAID = [
    "{models: [{model: a, weight: 2}, b], method: average, dtype: bfloat16, name: mine}",
    "{models: [a, b], base: c, method: {name: task_arithmetic, scale: [0.2, 0.7], normalize: true}}",
    "{models: [{model: a, weight: [1, 0], density: 0.3}, b], base: c, chat_template: auto, "
    "method: {name: ties, trim: parameter, density: 1.0}, overrides: [{match: '*mlp*', models: "
    "{a: {weight: 3}}}, {match: '*0*', method: {scale: 0.5}, models: {a: {weight: 4}, b: {density: 0.1}}}]}",
    "{models: [{model: a, weight: 0.7}, {model: b, weight: 0.3}], method: slerp, overrides: "
    "[{match: '*mlp*', models: {a: {weight: [0, 1]}, b: {weight: [1, 0]}}}]}",
    "{models: [a, b], base: c, method: {name: dare_ties, rescale: false, density: 1.0}}",
    "{models: [a], method: {name: passthrough, scale: 2}}",
]  # fmt: skip
UNSAID = [
    "{models: [a, b], method: magmax, base: c}",
    "{models: [a, b], method: ties, base: c}",  # ranked over the whole model
    "{models: [a, b], method: average, dtype: fp8}",
    "{models: [a, b], method: average, heads: classifier.*}",
    "{models: [a, b], method: average, overrides: [{match: layers.0.w, method: {normalize: false}}]}",
    "{models: [a, b], method: average, overrides: [{match: '*w*', only: [a]}]}",
    "{models: [{model: a, weight: 3}, b], method: slerp}",
    "{models: [a, b], method: average, stack: [{match: 'x.*', layers: [{a: [0, 1]}]}]}",
    "{models: [a, b], method: average, stack: [{layers: [{a: [0, 1]}]}, {layers: [{b: [0, 1]}]}]}",
    "{models: [{model: a, statistics: s}, b], method: average}",
    "{models: [a, b], method: average, ignore_tokenizers: true}",
    "{models: [a, b], method: average, overrides: [{layers: [0, 2], method: {normalize: false}}]}",
    # Before and after all layers mergekit has what the first and the last slice say.
    "{models: [a, b], method: average, stack: [{a: [0, 4]}], overrides: [{layers: [0, 4], method: {normalize: false}}]}",
    "{models: [a, b], method: average, stack: [{a: [0, 2]}, {b: [2, 4]}], overrides: [{layers: after, method: {normalize: false}}]}",
    "{models: [a, b], method: average, stack: [{a: [0, 2]}, {b: [2, 4]}], overrides: [{layers: [1, 3], models: {a: {weight: 2}}}]}",
    # Over all layers, where it would go over each slice.
    "{models: [{model: a, weight: [0, 1]}, b], method: average, stack: [{a: [0, 2]}, {b: [2, 4]}]}",
    "{models: [a, b], method: average, overrides: [{match: ['*a*', '*b*'], models: {a: {weight: 2}}}]}",
    "{models: [a, b], method: average, overrides: [{match: '*a?*', models: {a: {weight: 2}}}]}",
    "{models: [a, b], base: c, method: task_arithmetic, overrides: [{match: '*a*', method: ties}]}",
    # Weights that are no points of an arc, or not of one for all parameters.
    "{models: [{model: a, weight: [0.5, 1]}, {model: b, weight: 0.5}], method: slerp}",
    "{models: [{model: a, weight: [1, 0]}, {model: b, weight: [0, 0.5, 1]}], method: slerp}",
    "{models: [{model: a, weight: [1, 0]}, {model: b, weight: [0, 0.5]}], method: slerp}",
    "{models: [{model: a, weight: 0.5}, {model: b, weight: 0.5}], method: slerp, overrides: "
    "[{match: '*w*', models: {a: {weight: 0.25}}}]}",
    "{models: [{model: a, weight: 0.5}, {model: b, weight: 0.5}], method: slerp, overrides: "
    "[{match: '*w*', models: {a: {weight: 0.25}, b: {}}}]}",
]


NAMES_HERE = {"linear": "average"}  # what mergekit calls our average is a method here as well


def rules_of(data: Any) -> list[Any]:
    found = make_rules(make_recipe(data), NAMES)
    return [
        (
            dict(zip(r.models, r.weights, strict=True)),
            r.shares,
            r.method.model_dump(exclude={"density"})
            | {"name": NAMES_HERE.get(r.method.name, r.method.name)},
        )
        for r in (found[name] for name in NAMES)
    ]


@pytest.mark.parametrize("text", SAID)
def test_there_and_back(text: str) -> None:
    data = yaml.safe_load(text)
    recipe = make_recipe(data)
    theirs = to_mergekit(recipe, {"a": "owner/a"})
    assert theirs is not None
    assert "owner/a" in str(theirs)
    back, notes = from_mergekit(yaml.safe_load(yaml.safe_dump(theirs)))
    assert not notes
    assert rules_of(back) == rules_of(data)
    again = make_recipe(back)
    assert (again.name, again.dtype, again.chat_template) == (
        recipe.name, recipe.dtype or "widest", recipe.chat_template,
    )  # fmt: skip


def test_stacks() -> None:
    recipe = make_recipe(
        yaml.safe_load(
            "{models: [a, b, d], base: c, method: task_arithmetic, stack: [{a: [0, 2]}, {b: [1, 3], "
            "base: [0, 2]}, {a: [3, 4], base: {model: d, layers: [2, 3]}}]}"
        )
    )
    theirs = to_mergekit(recipe, {})
    assert theirs is not None
    assert [
        [(s["model"], s["layer_range"]) for s in one["sources"]] for one in theirs["slices"]
    ] == [
        [("a", [0, 2]), ("c", [0, 2])],
        [("b", [1, 3]), ("c", [0, 2])],
        [("a", [3, 4]), ("d", [2, 3])],
    ]
    assert theirs["slices"][2]["base_model"] == "d"
    back = make_recipe(from_mergekit(theirs)[0])
    for i in range(3):
        (ours,), (again,) = recipe.stack, back.stack
        assert (ours.starts_at(i), ours.base_at(i)) == (again.starts_at(i), again.base_at(i))


def test_every_slice_lists_a_base_that_may_be_left_out_here() -> None:
    text = "{models: [a, b], base: c, method: nuslerp, stack: [{a: [0, 2], b: [1, 3]}]}"
    theirs = to_mergekit(make_recipe(yaml.safe_load(text)), {})
    assert theirs is not None
    ((*_, last),) = (one["sources"] for one in theirs["slices"])
    assert last == {"model": "c", "layer_range": [0, 2]}
    assert "&" not in yaml.safe_dump(theirs)  # no ranges that are one and the same


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", None])
def test_only_the_result_is_rounded(dtype: str | None) -> None:
    theirs = to_mergekit(
        make_recipe({"models": ["a", "b"], "method": "average", "dtype": dtype}), {}
    )
    assert theirs is not None
    is_short = dtype in ("float16", "bfloat16")
    assert theirs.get("dtype") == ("float32" if is_short else dtype)
    assert theirs.get("out_dtype") == (dtype if is_short else None)


SLICES = {
    "evolved": """
        base_model: c
        merge_method: ties
        parameters: {normalize: 1.0, lambda: [{filter: embed, value: 0.3}, {value: 1.2}]}
        slices:
          - sources:
              - {model: a, layer_range: [0, 2], parameters: {weight: [{filter: mlp, value: [0, 1]}, {value: 2}]}}
              - {model: b, layer_range: [0, 2], parameters: {weight: 0.1, density: [0.4, 0.9]}}
              - {model: c, layer_range: [0, 2]}
            parameters: {lambda: 0.7, normalize: false}
          - sources:
              - {model: a, layer_range: [2, 4], parameters: {weight: 0.3, density: 0.25}}
              - {model: c, layer_range: [2, 4]}
    """,
    "t": """
        base_model: a
        merge_method: slerp
        parameters: {t: [{filter: mlp, value: [1, 0, 0.5]}, {value: 0.3}]}
        slices:
          - sources: [{model: a, layer_range: [0, 3]}, {model: b, layer_range: [0, 3]}]
          - sources: [{model: a, layer_range: [2, 3]}, {model: b, layer_range: [3, 4]}]
            parameters: {t: 0.9}
    """,
    "scales": """
        merge_method: passthrough
        slices:
          - sources: [{model: a, layer_range: [0, 3]}]
          - sources: [{model: a, layer_range: [2, 3], parameters: {scale: [{filter: mlp, value: 0}, {value: 1}]}}]
    """,
}  # fmt: skip


@pytest.mark.parametrize("name", SLICES)
def test_slices_with_parameters_of_their_own(name: str) -> None:
    data, _ = from_mergekit(yaml.safe_load(SLICES[name]))
    theirs = to_mergekit(make_recipe(data), {})
    assert theirs is not None
    back, notes = from_mergekit(yaml.safe_load(yaml.safe_dump(theirs)))
    assert not notes
    assert rules_of(back) == rules_of(data)
    assert make_recipe(back).stack == make_recipe(data).stack


@pytest.mark.parametrize("text", UNSAID)
def test_what_mergekit_cannot_say(text: str) -> None:
    assert to_mergekit(make_recipe(yaml.safe_load(text)), {}) is None
