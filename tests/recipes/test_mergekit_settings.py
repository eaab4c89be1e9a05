"""Settings of mergekit's parameters, piece by piece: which value holds where."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matsmerge.checkpoints.alignment import matches
from matsmerge.recipes.mergekit_methods import REQUIRED
from matsmerge.recipes.mergekit_settings import (
    Settings,
    as_override,
    filtered,
    patterns_within,
    read_setting,
    share_weights,
    unfiltered,
    weights_on_arc,
)


def read(*scopes: dict[str, Any], default: Any = None) -> tuple[Any, list[str]]:
    problems: list[str] = []
    found = read_setting("weight", scopes, default, "model m", problems)
    return found, problems


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (3, [(3, None)]),
        ([0, 1], [([0, 1], None)]),
        ({"value": 2}, [(2, None)]),
        ({"value": 2, "filter": "*"}, [(2, None)]),
        ([{"value": 1, "filter": "mlp"}, {"value": 2}], [(2, None), (1, "mlp")]),
        ([{"value": 2}, {"value": 1, "filter": "mlp"}], [(2, None)]),  # never asked
        ([], [(9, None)]),
        (None, [(9, None)]),
        ({"value": 1, "filter": "mlp"}, [(9, None), (1, "mlp")]),
        ({"value": 1, "filter": 3}, [(9, None), (1, "3")]),
    ],
)
def test_forms_of_a_setting(setting: Any, expected: Any) -> None:
    assert read({"weight": setting}, default=9) == (expected, [])


def test_the_first_scope_counts_most_and_is_written_last() -> None:
    own = {"weight": [{"value": 1, "filter": "a"}, {"value": 2, "filter": "b"}]}
    whole = {"weight": [{"value": 3, "filter": "a"}, {"value": 4}]}
    assert read(own, whole)[0] == [(4, None), (3, "a"), (2, "b"), (1, "a")]
    assert read({}, whole)[0] == [(4, None), (3, "a")]


@pytest.mark.parametrize("wrong", [{"val": 1}, {"filter": "x"}, 3, None])
def test_entries_that_are_none(wrong: Any) -> None:
    found, problems = read({"weight": [{"value": 1, "filter": "x"}, wrong]})
    assert found == []
    assert problems == [
        f"model m: 'weight': expected entries with 'value' and 'filter', found {wrong!r}"
    ]


def test_what_must_be_given() -> None:
    problem = "mergekit needs a 'weight' for every parameter of model m; add one without a filter"
    assert read(default=REQUIRED) == ([(REQUIRED, None)], [problem])
    _, problems = read({"weight": {"value": 1, "filter": "mlp"}}, default=REQUIRED)
    assert problems == [problem]
    assert read({"weight": 0}, default=REQUIRED) == ([(0, None)], [])


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("layers.3.", True),
        ("layer3.", True),
        ("h.12", True),
        ("model.layers.0.mlp", True),
        ("blocks.7.", True),
        ("mlp", False),
        ("fc1", False),
        ("conv2d", False),
        ("w1.weight", False),
    ],
)
def test_filters_that_name_layers_of_slices(text: str, is_refused: bool) -> None:
    """In the result their numbers are others; `fc1` and the like are no layers."""
    for is_renumbered in (False, True):
        problems: list[str] = []
        scopes = [{"scale": [{"filter": text, "value": 2}]}]
        read_setting("scale", scopes, 1, "m", problems, is_renumbered=is_renumbered)
        assert bool(problems) == (is_refused and is_renumbered), text


def test_points_on_an_arc() -> None:
    problems: list[str] = []
    first, second = weights_on_arc([(0.25, None), ([0, 1, "0.5"], "mlp")], problems)
    assert first == [(0.75, None), ([1, 0, 0.5], "mlp")]
    assert second == [(0.25, None), ([0, 1, 0.5], "mlp")]
    assert problems == []


@pytest.mark.parametrize("wrong", ["x", ["x"], [None], {"a": 1}])
def test_points_that_are_no_numbers(wrong: Any) -> None:
    problems: list[str] = []
    assert weights_on_arc([(wrong, None)], problems) == ([], [])
    assert problems == [f"the parameter 't' must be numbers, found {wrong!r}"]


def test_what_is_required_has_been_complained_about_already() -> None:
    problems: list[str] = []
    assert weights_on_arc([(REQUIRED, None)], problems) == ([], [])
    assert problems == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_two_weights_on_an_arc_add_up_to_one(ts: list[float]) -> None:
    (of_first,), (of_second,) = weights_on_arc([(ts, None)], [])
    assert of_second[0] == ts
    assert [a + b for a, b in zip(of_first[0], of_second[0], strict=True)] == pytest.approx(
        [1] * len(ts)
    )


def of_weights(*weights: Any) -> Settings:
    return {(f"m{i}", "weight"): [(w, None)] for i, w in enumerate(weights)}


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((0, 0), (0.5, 0.5)),
        ((1, -1), (0.5, 0.5)),
        ((1, 1), (1, 1)),
        ((0, 0, 0), (0, 0, 0)),
        (([0, 1], [0, -1]), ([0, 1], [0, -1])),
    ],
)
def test_weights_that_add_up_to_nothing_are_shared_between_two(
    weights: tuple[Any, ...], expected: tuple[Any, ...]
) -> None:
    settings = of_weights(*weights)
    share_weights([path for path, _ in settings if path], settings)
    assert settings == of_weights(*expected)


def test_weights_with_filters_are_not_shared() -> None:
    settings = of_weights(0, 0)
    settings["m0", "weight"].append((1, "mlp"))
    before = {key: list(value) for key, value in settings.items()}
    share_weights(["m0", "m1"], settings)
    assert settings == before


def test_what_holds_everywhere_and_what_for_filters() -> None:
    settings: Settings = {
        (None, "scale"): [(0.5, None), (2, "mlp")],
        ("a", "weight"): [(1, None), (3, "w"), (4, "mlp")],
        ("a", "density"): [(None, None)],
        ("b", "weight"): [],
    }
    assert unfiltered(settings) == {None: {"scale": 0.5}, "a": {"weight": 1}}
    assert list(filtered(settings)) == [
        ("w", {"a": {"weight": 3}}),
        ("mlp", {None: {"scale": 2}, "a": {"weight": 4}}),
    ]


def test_filters_of_different_orders_stay_apart() -> None:
    settings: Settings = {
        ("a", "weight"): [(0, None), (1, "x"), (2, "y")],
        ("b", "weight"): [(0, None), (3, "y"), (4, "x")],
    }
    assert list(filtered(settings)) == [
        ("x", {"a": {"weight": 1}}),
        ("y", {"a": {"weight": 2}}),
        ("y", {"b": {"weight": 3}}),
        ("x", {"b": {"weight": 4}}),
    ]
    assert list(filtered({})) == []


def test_overrides_name_models_as_the_recipe_does() -> None:
    names = {"x/a": "a"}
    assert as_override({}, {}, names) == {}
    assert as_override({"scale": 1}, {}, names) == {"method": {"scale": 1}}
    assert as_override({}, {"x/a": {"weight": 2}}, names) == {"models": {"a": {"weight": 2}}}


PATTERNS = [None, ["*"], ["encoder.*"], ["*language_model*", "lm_head*"], ["a.*", "*"]]


@pytest.mark.parametrize("patterns", PATTERNS)
@pytest.mark.parametrize(
    "name",
    ["encoder.mlp.w", "mlp.w", "model.language_model.mlp.w", "mlp.language_model.w", "lm_head.mlp"],
)
def test_a_filter_within_a_module(patterns: list[str] | None, name: str) -> None:
    """A name is matched if it holds the text and is in the module."""
    found = list(patterns_within("mlp", patterns))
    is_within = patterns is None or matches(name, patterns)
    assert matches(name, found) == is_within
    assert not matches(name.replace("mlp", "attn"), found)


@pytest.mark.parametrize("text", ["a*b", "a?b", "a[b]c", "*", "[", "]"])
def test_characters_of_patterns_stand_for_themselves(text: str) -> None:
    (pattern,) = patterns_within(text, None)
    assert matches(f"x.{text}.y", [pattern])
    assert not matches("x.aXb.y", [pattern])
    assert not matches("x", [pattern])
