"""Stacks by themselves: what they say of layers, models and bases, and what is no stack."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matsmerge import RecipeError
from matsmerge.recipes.recipe import make_recipe
from matsmerge.recipes.stack import Stack, as_stacks

SEVERAL = Stack.model_validate(
    {
        "layers": [
            {"a": [0, 4]},
            {"a": [2, 4], "b": [6, 8]},
            {"a": [1, 2], "base": [5, 6]},
            {"b": [0, 3], "base": {"model": "c", "layers": [4, 7]}},
        ]
    }
)


def test_what_a_stack_says() -> None:
    assert SEVERAL.num_layers == 4 + 2 + 1 + 3
    assert [SEVERAL.span(i) for i in range(4)] == [(0, 4), (4, 6), (6, 7), (7, 10)]
    assert [SEVERAL.models_at(i) for i in range(4)] == [("a",), ("a", "b"), ("a",), ("b",)]
    assert [SEVERAL.starts_at(i) for i in range(4)] == [
        {"a": 0}, {"a": 2, "b": 6}, {"a": 1}, {"b": 0},
    ]  # fmt: skip
    assert SEVERAL.names == {"a", "b", "c"}
    assert SEVERAL.match == ["*"]


def test_whose_layers_are_the_bases() -> None:
    """Those of the same numbers, unless models differ or something else is said."""
    assert SEVERAL.base_at(0) == ("base", 0)
    assert SEVERAL.base_at(1) is None
    assert SEVERAL.base_at(2) == ("base", 5)
    assert SEVERAL.base_at(3) == ("c", 4)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=6))
def test_spans_follow_each_other(ranges: list[tuple[int, int]]) -> None:
    stack = Stack.model_validate({"layers": [{"a": [s, s + n]} for s, n in ranges]})
    spans = [stack.span(i) for i in range(len(ranges))]
    assert spans[0][0] == 0
    assert spans[-1][1] == stack.num_layers == sum(n for _, n in ranges)
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert [b - a for a, b in spans] == [n for _, n in ranges]


def test_layers_alone_are_a_stack() -> None:
    layers = [{"a": [0, 2]}, {"b": [1, 2]}]
    assert as_stacks(layers) == [{"layers": layers}]
    assert as_stacks([{"layers": layers}]) == [{"layers": layers}]
    others: list[Any] = [[], None, "x", 3]
    for other in others:
        assert as_stacks(other) == other


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{"a": [0, 0]}], "the layers [0, 0] are none: expected [FIRST, LAST + 1]"),
        ([{"a": [2, 1]}], "the layers [2, 1] are none"),
        ([{"a": [-1, 1]}], "the layers [-1, 1] are none"),
        ([{"a": [0, 2], "b": [0, 3]}], "different numbers of layers: 2 of a, 3 of b"),
        ([{"a": [0, 1]}, {}], "layers.1: names no model; give it one, as in {A: [0, 8]}"),
        ([{"base": [0, 2]}], "layers.0: names no model"),
        ([{"a": {"model": "b", "layers": [0, 1]}}], "layers.0.a: expected [FIRST, LAST + 1]"),
        ([{"a": [0, 1], "base": {"model": "b", "layers": [0, 2]}}], "1 of a, 2 of base"),
        ([{"z": [0, 1]}], "stack: there is no model 'z'; there is a, b"),
        ([{"a": [0, 1], "base": {"model": "aa", "layers": [0, 1]}}], "there is no model 'aa'"),
        ([{"a": "0-8"}], "stack.0.layers.0.a"),
        ([{"a": [0, 1, 2]}], "stack.0.layers.0.a"),
    ],
)
def test_what_is_no_stack(layers: list[Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        make_recipe({"models": ["a", "b"], "base": "c", "method": "ties", "stack": layers})
    assert any(message in problem for problem in error.value.problems), error.value.problems


def test_a_stack_with_other_keys() -> None:
    with pytest.raises(RecipeError, match="stack.0: unknown key 'mtach'; did you mean 'match'"):
        make_recipe(
            {
                "models": ["a"],
                "method": "average",
                "stack": [{"mtach": "x", "layers": [{"a": [0, 1]}]}],
            }
        )


def test_models_may_be_the_base_where_a_stack_chooses() -> None:
    """Without a stack a model that is the base, too, is refused."""
    given = {"models": ["a", "c"], "base": "c", "method": "ties"}
    with pytest.raises(RecipeError, match="c is both a model and the base"):
        make_recipe(given)
    make_recipe(given | {"stack": [{"a": [0, 2], "c": [0, 2]}]})
