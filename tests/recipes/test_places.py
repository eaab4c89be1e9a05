"""Where parameters are: in which layer of which stack, how deep, before or after all layers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matsmerge import RecipeError
from matsmerge.recipes.recipe import make_recipe
from matsmerge.recipes.rules import check_patterns, find_places, make_rules

LLAMA = [
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.2.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


def test_layers_of_a_stack() -> None:
    places = find_places(LLAMA)
    layers = [places[name] for name in LLAMA[1:4]]
    assert [(p.stack, p.layer, p.rest, p.last) for p in layers] == [
        ("model.layers", i, ".mlp.up_proj.weight", 2) for i in range(3)
    ]
    assert [place.depth for place in layers] == [0.0, 0.5, 1.0]


def test_what_is_before_and_after() -> None:
    places = find_places(LLAMA)
    outside = [places[name] for name in (LLAMA[0], *LLAMA[4:])]
    assert [place.is_before for place in outside] == [True, False, False]
    assert [place.depth for place in outside] == [0.0] * 3
    assert [place.is_in("before") for place in outside] == [True, False, False]
    assert [place.is_in("after") for place in outside] == [False, True, True]
    assert not any(
        places[name].is_in(where) for name in LLAMA[1:4] for where in ("before", "after")
    )


@pytest.mark.parametrize(
    ("name", "is_before"),
    [
        ("wte.weight", True),
        ("wpe.weight", True),
        ("shared.weight", True),
        ("encoder.shared.weight", True),
        ("vit.embeddings.cls_token", True),
        ("vision_model.pre_layrnorm.weight", True),
        ("embed_out.weight", False),
        ("lm_head.weight", False),
        ("norm.weight", False),
        ("classifier.bias", False),
        ("unshared.weight", False),
    ],
)
def test_names_of_what_comes_first(name: str, is_before: bool) -> None:
    (place,) = find_places([name]).values()
    assert place.is_before == is_before


def test_stacks_are_counted_by_themselves() -> None:
    names = [f"encoder.block.{i}.w" for i in range(5)] + [f"decoder.block.{i}.w" for i in range(2)]
    places = find_places(names)
    assert places["encoder.block.2.w"].depth == 0.5
    assert places["decoder.block.1.w"].depth == 1.0
    assert {p.stack for p in places.values()} == {"encoder.block", "decoder.block"}


def test_only_the_first_number_is_a_layer() -> None:
    places = find_places(["layers.3.experts.7.w", "0.weight", "a.b1.w", "h.2"])
    assert places["layers.3.experts.7.w"].layer == 3
    assert places["layers.3.experts.7.w"].rest == ".experts.7.w"
    assert (places["0.weight"].stack, places["0.weight"].layer) == ("", 0)
    assert places["a.b1.w"].layer is None
    assert (places["h.2"].layer, places["h.2"].rest) == (2, "")


def test_one_layer_is_the_last() -> None:
    assert find_places(["layers.0.w"])["layers.0.w"].depth == 1.0


@given(st.integers(1, 30), st.integers(0, 29), st.integers(1, 30))
def test_depths_within_ranges(num_layers: int, first: int, length: int) -> None:
    places = find_places([f"layers.{i}.w" for i in range(num_layers)])
    span = (first, first + length)
    within = [p for p in places.values() if p.is_in(span)]
    assert len(within) == max(0, min(num_layers, first + length) - first)
    depths = [place.depth_within(span) for place in within]
    assert depths == sorted(depths)
    assert all(0 <= depth <= 1 for depth in depths)
    if within and length > 1:
        assert depths[0] == 0.0
    if len(within) == length:
        assert depths[-1] == 1.0
    for place in within:
        assert place.depth_within(None) == place.depth
        assert place.depth_within("before") == 0.0


def recipe(**override: Any) -> Any:
    return make_recipe(
        {
            "models": ["a", "b"],
            "base": "c",
            "method": "task_arithmetic",
            "overrides": [{"method": {"scale": [0, 1]}, **override}],
        }
    )


def scales(made: Any) -> list[float]:
    rules = make_rules(made, LLAMA)
    return [rules[name].method.model_dump()["scale"] for name in LLAMA]


def test_lists_run_over_the_layers_of_an_override() -> None:
    default = make_rules(recipe(match="lm_head*"), LLAMA)[LLAMA[0]].method.model_dump()["scale"]
    assert scales(recipe(layers=[1, 3])) == [default, default, 0, 1, default, default]
    assert scales(recipe(layers=[0, 3])) == [default, 0, 0.5, 1, default, default]
    assert scales(recipe(layers=[2, 3])) == [default, default, default, 1, default, default]
    assert scales(recipe(match="*mlp*")) == [default, 0, 0.5, 1, default, default]
    assert scales(recipe(layers="before")) == [0, *[default] * 5]
    assert scales(recipe(layers="after")) == [*[default] * 4, 0, 0]
    assert scales(recipe(layers="after", match="lm_*")) == [*[default] * 5, 0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"match": "*attn*"}, "the override pattern '*attn*' matches no parameter, e.g. model.emb"),
        ({"layers": [3, 5]}, "the override ['*'], layers (3, 5) matches no parameter"),
        ({"layers": "before", "match": "lm_head*"}, "layers before matches no parameter"),
    ],
)
def test_overrides_of_nothing(override: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        check_patterns(recipe(**override), LLAMA)
    assert message in error.value.problems[0]
    (note,) = check_patterns(recipe(**override, required=False), LLAMA)
    assert message in note


def test_overrides_of_something_are_not_spoken_of() -> None:
    assert check_patterns(recipe(layers=[0, 9]), LLAMA) == []
    # A filter that is there in some parts of the layers need not be in all of them.
    parts = [{"match": "*mlp*", "layers": at, "required": False} for at in ([0, 3], "after")]
    both = recipe(match="*").model_dump(exclude_defaults=True) | {
        "overrides": [part | {"method": {"scale": 0.5}} for part in parts]
    }
    assert check_patterns(make_recipe(both), LLAMA) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"match": "x"}, "overrides.0: changes nothing; give it a method, models or only"),
        (
            {"method": {"scale": 1}},
            "overrides.0: say which parameters it is for, by match or layers",
        ),
        ({"only": ["z"], "match": "x"}, "there is no model 'z'; there is a, b"),
        ({"only": [], "match": "x"}, "overrides.0.only"),
        ({"layers": [2, 2], "only": ["a"]}, "the layers [2, 2] are none"),
        ({"layers": "between", "only": ["a"]}, "overrides.0.layers"),
    ],
)
def test_what_is_no_override(override: dict[str, Any], message: str) -> None:
    data = {"models": ["a", "b"], "method": "average", "overrides": [override]}
    with pytest.raises(RecipeError) as error:
        make_recipe(data)
    assert any(message in problem for problem in error.value.problems), error.value.problems


def test_nobody_takes_part() -> None:
    made = make_recipe(
        {
            "models": ["a", "b"],
            "method": "average",
            "overrides": [
                {"match": "*mlp*", "only": ["a"]},
                {"match": "*up_proj*", "only": ["b"]},
            ],
        }
    )
    with pytest.raises(RecipeError, match="model.layers.0.*: no model takes part in it"):
        make_rules(made, LLAMA)
