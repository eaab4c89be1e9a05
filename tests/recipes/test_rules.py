from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import matsmerge
from matsmerge import RecipeError
from matsmerge.methods.options import at_depth
from matsmerge.recipes.recipe import make_recipe
from matsmerge.recipes.rules import find_places, make_rules

NAMES = ["embed", "layers.0.attn", "layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "norm"]


def rules(**data: Any) -> Any:
    recipe = make_recipe({"models": ["a", "b"], "base": "c", "method": "task_arithmetic"} | data)
    return make_rules(recipe, NAMES)


def test_depth() -> None:
    names = ["x.w", "enc.block.0.a.5.w", "enc.block.3.w", "dec.block.1.w", "one.0.w", "7.w"]
    assert [place.depth for place in find_places(names).values()] == [0, 0, 1, 1, 1, 1]


@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=5), depth=st.floats(0, 1))
def test_interpolation(values: list[float], depth: float) -> None:
    import numpy as np

    expected = np.interp(depth * (len(values) - 1), range(len(values)), values)
    assert at_depth(values, depth) == pytest.approx(expected, abs=1e-9)


def test_numbers_over_depth() -> None:
    found = rules(
        method={"name": "task_arithmetic", "scale": [0, 1]},
        models=[{"model": "a", "weight": [1, 3]}, "b"],
    )
    assert [found[n].method.scale for n in NAMES] == [0, 0, 0, 0.5, 1, 0]
    assert [found[n].weights for n in NAMES][2:5] == [(1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "tsv_m"])
def test_two_numbers_over_depth_are_lines(method: str) -> None:
    """As LiNeS has it: block l of L is scaled by α + β l / (L - 1), what is in no block by α."""
    alpha, beta, num = 0.25, 0.6, 5
    g = torch.Generator().manual_seed(0)
    names = ["embed", *(f"visual.blocks.{i}.mlp.weight" for i in range(num)), "norm"]
    base, *models = (
        {n: torch.randn(4, 6, generator=g, dtype=torch.float64) for n in names} for _ in range(3)
    )
    found = matsmerge.merge(models, base, method, scale=[alpha, alpha + beta])
    whole = matsmerge.merge(models, base, method, scale=1.0)
    scales = [alpha, *(alpha + beta * block / (num - 1) for block in range(num)), alpha]
    for name, scale in zip(names, scales, strict=True):
        expected = base[name] + scale * (whole[name] - base[name])
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9)


def test_options_of_inits_over_depth() -> None:
    init = {"name": "task_arithmetic", "scale": [0.5, 0.9]}
    found = rules(method={"name": "mats_kfac", "init": init})
    scales = [found[n].method.init.scale for n in NAMES]
    assert scales == pytest.approx([0.5, 0.5, 0.5, 0.7, 0.9, 0.5])


def test_overrides_stack_and_the_last_wins() -> None:
    found = rules(
        overrides=[
            {"match": "*.mlp", "method": {"scale": 0.5}},
            {"match": "layers.1.*", "method": {"normalize": True}},
            {"match": ["embed", "norm"], "method": "average"},
            {"match": "layers.2.mlp", "models": {"a": {"weight": 0}}},
            {"match": "layers.2.*", "models": {"a": {"weight": 7}}},
        ]
    )
    assert (found["layers.0.mlp"].method.scale, found["layers.0.mlp"].method.normalize) == (
        0.5,
        False,
    )
    assert (found["layers.1.mlp"].method.scale, found["layers.1.mlp"].method.normalize) == (
        0.5,
        True,
    )
    assert type(found["norm"].method).__name__ == "Average"
    assert found["layers.2.mlp"].weights == (7, 1)
    assert found["layers.0.attn"].method.scale == 1.0


def test_densities() -> None:
    found = rules(method="ties", models=[{"model": "a", "density": 0.5}, "b"])
    assert [s.density for s in found["norm"].shares] == [0.5, 0.2]
    with pytest.raises(RecipeError, match="densities.*at most 1"):
        rules(method="ties", models=[{"model": "a", "density": 1.5}])


def test_importance() -> None:
    found = rules(method="mats", models=[{"model": "a", "importance": 3}, "b"], base="c")
    assert [s.importance for s in found["norm"].shares] == [3, 1]
    with pytest.raises(RecipeError, match="importance -1.* must not be negative"):
        rules(method="mats", models=[{"model": "a", "importance": -1}, "b"], base="c")
    with pytest.raises(RecipeError, match="method average has no importance, but the model a"):
        rules(method="average", models=[{"model": "a", "importance": 3}, "b"])


def test_weights_that_sum_to_zero() -> None:
    models = [{"model": "a", "weight": 1}, {"model": "b", "weight": -1}]
    with pytest.raises(RecipeError, match="sum to zero"):
        rules(method="average", models=models)
    assert rules(method={"name": "average", "normalize": False}, models=models)
    rounded = [{"model": name, "weight": w} for name, w in (("a", 0.1), ("b", 0.2), ("c", -0.3))]
    with pytest.raises(RecipeError, match="sum to zero.*; say normalize: false"):
        rules(method={"name": "dare_linear", "normalize": True}, models=rounded, base="d")


@pytest.mark.parametrize(
    ("method", "options"),
    [("task_arithmetic", {}), ("dare_linear", {"density": 1.0}), ("breadcrumbs", {})],
)
def test_weights_that_are_all_zero(method: str, options: dict[str, Any]) -> None:
    """In some layers, say: nothing is added to the base there, but an average is none."""
    a, b, base = ({"0.w": torch.full((3,), v), "1.w": torch.full((3,), v)} for v in (1.0, 3.0, 0.5))
    weights: dict[str, Any] = {"weights": [[0.0, 1.0], 0.0], "normalize": True}
    merged = matsmerge.merge([a, b], base, method, **weights, **options)
    assert [merged[name].tolist() for name in ("0.w", "1.w")] == [[0.5] * 3, [1.0] * 3]
    with pytest.raises(RecipeError, match="sum to zero"):
        matsmerge.merge([a, b], method="average", **weights)


def test_overrides_in_a_merge() -> None:
    a, b, base = ({"x.w": torch.full((4,), v), "y.w": torch.full((4,), v)} for v in (1.0, 3.0, 0.0))
    merged = matsmerge.merge(
        {"a": a, "b": b},
        base,
        "task_arithmetic",
        overrides=[{"match": "y.*", "method": {"name": "passthrough", "model": "b"}}],
    )
    assert merged["x.w"].tolist() == [4.0] * 4
    assert merged["y.w"].tolist() == [3.0] * 4
    with pytest.raises(RecipeError, match=r"'z\.\*' matches no parameter"):
        matsmerge.merge([a, b], overrides=[{"match": ["x.*", "z.*"], "method": "average"}])


def test_ties_ranks_parameters_with_other_scales_together() -> None:
    base = {"x": torch.zeros(10), "y": torch.zeros(10)}
    model = {"x": torch.full((10,), 1.0), "y": torch.full((10,), 2.0)}
    merged = matsmerge.merge(
        [model], base, "ties", density=0.5, overrides=[{"match": "y", "method": {"scale": 0.5}}]
    )
    assert merged["x"].tolist() == [0.0] * 10
    assert merged["y"].tolist() == [1.0] * 10


def test_overrides_that_do_not_go_together() -> None:
    with pytest.raises(RecipeError, match=r"layers.0.mlp: override.*unknown parameter 'scale'"):
        rules(
            overrides=[
                {"match": "*.mlp", "method": {"name": "average"}},
                {"match": "layers.0.*", "method": {"scale": 0.5}},
            ]
        )
