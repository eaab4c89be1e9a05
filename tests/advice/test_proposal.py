"""Which method and weights are proposed in which situation."""

from typing import Any

import pytest

from matsmerge.advice.expectations import expect
from matsmerge.advice.proposal import Situation, candidates, propose_weights
from matsmerge.methods import METHODS
from matsmerge.recipes.recipe import make_recipe

NAMES = ("a", "b", "c")


def situation(**changes: Any) -> Situation:
    given: dict[str, Any] = {"models": NAMES, "view": "full", "change": 0.02}
    return Situation(**given | changes)


def best(now: Situation) -> str:
    return next(iter(candidates(now))).name


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({}, "actmat"),
        ({"has_data": True}, "mats_cross"),
        ({"kinds": frozenset({"gram", "kfac"})}, "mats_kfac"),
        ({"kinds": frozenset({"gram"})}, "regmean"),
        ({"kinds": frozenset({"fisher"})}, "actmat"),
        ({"has_data": True, "kinds": frozenset({"gram", "kfac"})}, "mats_cross"),
        ({"is_language_model": True}, "actmat"),
        ({"is_language_model": True, "has_data": True}, "mats_cross"),
        ({"is_language_model": True, "change": 0.001}, "task_arithmetic"),
        ({"change": 0.001}, "actmat"),
        ({"has_data": True, "poor": ("a",)}, "mats_cross"),
        ({"has_data": True, "poor": ("a", "b")}, "task_arithmetic"),
        ({"view": "vectors"}, "task_arithmetic"),
        ({"view": "vectors", "has_data": True}, "mats_cross"),
        ({"view": "vectors", "kinds": frozenset({"block_fisher"})}, "mats"),
        ({"view": "folded"}, "actmat"),
        ({"large": {"a": 4.0}}, "wudi"),
    ],
)
def test_methods(changes: dict[str, Any], method: str) -> None:
    assert best(situation(**changes)) == method


def test_the_last_candidate_can_always_be_used() -> None:
    for changes in ({}, {"has_data": True}, {"view": "vectors"}, {"poor": NAMES}):
        *_, last = candidates(situation(**changes))
        assert last.name == "task_arithmetic"
        assert not last.data
        assert not last.statistics


def test_settings() -> None:
    def scale(num: int) -> Any:
        names = tuple(f"m{i}" for i in range(num))
        return next(iter(candidates(situation(models=names, poor=names)))).method["scale"]

    assert [scale(num) for num in (2, 3, 8)] == [0.5, 0.33, 0.3]
    adapters = next(iter(candidates(situation(view="folded", has_data=True))))
    assert adapters.output == "dense"


def weights(**changes: Any) -> dict[str, float]:
    now = situation(**changes)
    return propose_weights(now, next(iter(candidates(now))))


def test_models_count_the_same_unless_something_speaks_against_it() -> None:
    kfac = frozenset({"kfac", "gram"})
    for changes in ({}, {"has_data": True, "large": {"a": 4.0}}, {"kinds": kfac}):
        assert weights(**changes) == dict.fromkeys(NAMES, 1.0)
    # K-FAC is brought to one size by itself.
    uneven = {"a": 1.0, "b": 100.0, "c": 10.0}
    assert weights(kinds=kfac, fisher=uneven) == dict.fromkeys(NAMES, 1.0)


def test_weights_of_poor_models() -> None:
    assert weights(has_data=True, poor=("b",)) == {"a": 1.0, "b": 0.3, "c": 1.0}  # from the init
    assert weights(kinds=frozenset({"kfac"}), poor=("b",)) == {"a": 1.0, "b": 0.1, "c": 1.0}
    assert weights(poor=("a", "b")) == {"a": 0.3, "b": 0.3, "c": 1.0}


def test_weights_of_long_task_vectors() -> None:
    assert weights(large={"a": 4.0}) == {"a": 0.25, "b": 1.0, "c": 1.0}
    close = {"is_language_model": True, "change": 0.001}
    assert weights(large={"a": 4.0}, **close) == {"a": 0.5, "b": 1.0, "c": 1.0}
    assert weights(large={"a": 1e6})["a"] == 0.05


def test_weights_of_fisher_information() -> None:
    vectors = {"view": "vectors", "kinds": frozenset({"block_fisher"})}
    assert weights(**vectors, fisher={"a": 1.0, "b": 20.0, "c": 4.0}) == {
        "a": 4.0,
        "b": 0.2,
        "c": 1.0,
    }
    assert weights(**vectors, fisher={"a": 1.0, "b": 2.0, "c": 4.0}) == dict.fromkeys(NAMES, 1.0)


def test_methods_exist_and_recipes_take_them() -> None:
    kinds = frozenset({"gram", "kfac", "block_fisher"})
    for view in ("full", "vectors"):
        for one in candidates(situation(view=view, kinds=kinds)):
            assert one.name in METHODS
            make_recipe({"models": ["a", "b"], "base": "base", "method": one.method})


def test_expectations_are_of_the_nearest_suite() -> None:
    (near,), (far,) = expect("mats_kfac", 0.01), expect("mats_kfac", 0.2)
    assert "text-small" in near.text
    assert "mats_kfac kept 98 % and averaging 89 %" in near.text
    assert "vision-small" in far.text
    (unknown,) = expect("mats", 0.01)
    assert "There averaging kept 89 %" in unknown.text
    assert not list(expect("mats", 0.0))
