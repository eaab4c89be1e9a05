"""Interpolation on spheres against geometry written out densely in float64, with invariants."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import matsmerge

Array = NDArray[np.float64]
SHAPES: dict[str, tuple[int, ...]] = {"p": (12, 7), "q": (31,), "c": (5, 4, 3), "s": ()}
METHODS = ["nuslerp", "multislerp", "karcher"]


def models(num: int, seed: int = 0) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    g = torch.Generator().manual_seed(seed)
    base = {n: torch.randn(shape, generator=g) for n, shape in SHAPES.items()}
    tuned = [
        {n: v + 0.5 * torch.randn(v.shape, generator=g) for n, v in base.items()}
        for _ in range(num)
    ]
    return base, tuned


def check(formula: Callable[[list[Array]], Array], method: str, num: int, **options: Any) -> None:
    """Of the weights, or of the task vectors."""
    base, tuned = models(num)
    has_base = options.get("task_vectors", False)
    merged = matsmerge.merge(tuned, base if has_base else None, method, **options)
    for n in base:
        origin = base[n].double().numpy() if has_base else np.zeros(SHAPES[n])
        expected = origin + formula([m[n].double().numpy() - origin for m in tuned])
        np.testing.assert_allclose(merged[n].double().numpy(), expected, rtol=3e-7, atol=1e-7)


def slerp(a: Array, b: Array, t: float) -> Array:
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    angle = math.acos(max(-1.0, min(1.0, cosine)))
    if 1 - cosine**2 <= 1e-16:
        return (1 - t) * a + t * b
    return (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)


@pytest.mark.parametrize("task_vectors", [False, True])
def test_nuslerp(task_vectors: bool) -> None:
    def whole(ts: list[Array]) -> Array:
        return slerp(ts[0].flatten(), ts[1].flatten(), 0.25).reshape(ts[0].shape)

    def along(axis: int) -> Callable[[list[Array]], Array]:
        def merge(ts: list[Array]) -> Array:
            a, b = (np.moveaxis(np.atleast_1d(t), axis, -1) for t in ts)
            rows = [
                slerp(x, y, 0.25)
                for x, y in zip(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), strict=True)
            ]
            return np.moveaxis(np.stack(rows).reshape(a.shape), -1, axis).reshape(ts[0].shape)

        return merge

    options: dict[str, Any] = {"weights": [1.5, 0.5], "task_vectors": task_vectors}
    check(whole, "nuslerp", 2, **options)
    check(along(-1), "nuslerp", 2, nuslerp_flatten=False, **options)
    check(along(0), "nuslerp", 2, nuslerp_flatten=False, nuslerp_row_wise=True, **options)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("task_vectors", [False, True])
def test_multislerp(normalize: bool, task_vectors: bool) -> None:
    """With mergekit's steps into the tangent space and back."""
    weights = np.array([0.5, 1.0, 0.25])

    def merge(ts: list[Array]) -> Array:
        w = weights / weights.sum() if normalize else weights
        flat = np.stack([t.flatten() for t in ts])
        norms = np.linalg.norm(flat, axis=1)
        units = flat / norms[:, None]
        mean = w @ units
        mean /= np.linalg.norm(mean)
        tangent = w @ (units - (units @ mean)[:, None] * mean)
        length = np.linalg.norm(tangent) + 1e-8
        point = mean * math.cos(length) + tangent * math.sin(length) / length
        merged: Array = (point * (w @ norms)).reshape(ts[0].shape)
        return merged

    check(
        merge, "multislerp", 3, weights=weights.tolist(), normalize_weights=normalize,
        task_vectors=task_vectors,
    )  # fmt: skip


def test_multislerp_of_vectors_that_cancel_is_linear() -> None:
    _, (model,) = models(1)
    opposite = {n: -2 * v for n, v in model.items()}
    merged = matsmerge.merge([model, opposite], method="multislerp")
    for n in model:
        torch.testing.assert_close(merged[n], -0.5 * model[n])


@pytest.mark.parametrize("iterations", [0, 1, 10])
def test_karcher(iterations: int) -> None:
    """On vectors of full length, with logarithms and exponentials of the sphere."""

    def merge(ts: list[Array]) -> Array:
        flat = np.stack([t.flatten() for t in ts])
        norms = np.linalg.norm(flat, axis=1)
        units = flat / norms[:, None]
        mean = units.mean(0) / np.linalg.norm(units.mean(0))
        for _ in range(iterations):
            logs = []
            for u in units:
                dot = min(1.0, max(-1.0, u @ mean))
                angle = math.acos(dot)
                logs.append(0 * u if angle < 1e-5 else (u - dot * mean) * angle / math.sin(angle))
            step = np.mean(logs, axis=0)
            length = np.linalg.norm(step)
            if length < 1e-5:
                break
            mean = math.cos(length) * mean + math.sin(length) * step / length
            mean /= np.linalg.norm(mean)
        merged: Array = (norms.mean() * mean).reshape(ts[0].shape)
        return merged

    check(merge, "karcher", 3, max_iter=iterations)


def test_karcher_is_where_distances_are_least() -> None:
    """No neighbour on the sphere has a smaller sum of squared angles to the models."""
    _, tuned = models(4)
    merged = matsmerge.merge(tuned, method="karcher", max_iter=50, tol=1e-9)["p"].double()

    def spread(point: Tensor) -> float:
        def cosine(m: dict[str, Tensor]) -> Tensor:
            return torch.nn.functional.cosine_similarity(
                m["p"].double().flatten(), point.flatten(), dim=0
            )

        return sum(float(cosine(m).acos() ** 2) for m in tuned)

    g = torch.Generator().manual_seed(1)
    for _ in range(20):
        step = torch.randn(merged.shape, generator=g, dtype=torch.float64)
        assert spread(merged) < spread(merged + 0.01 * merged.norm() * step / step.norm())


@pytest.mark.parametrize("method", METHODS)
def test_models_of_zeros(method: str) -> None:
    zeros = {"p": torch.zeros(4, 3)}
    merged = matsmerge.merge([zeros, {"p": torch.zeros(4, 3)}], method=method)
    assert torch.equal(merged["p"], zeros["p"])


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), weight=st.floats(0.1, 10), turn=st.integers(0, 1000))
def test_turned_models_are_merged_to_the_turned_merge(
    method: str, seed: int, weight: float, turn: int
) -> None:
    """Rotations of the sphere; and the length is the mean length."""
    g = torch.Generator().manual_seed(seed)
    pair = [torch.randn(6, generator=g, dtype=torch.float64) for _ in range(2)]
    rotation = torch.linalg.qr(
        torch.randn(6, 6, generator=torch.Generator().manual_seed(turn), dtype=torch.float64)
    ).Q
    options: dict[str, Any] = {"method": method, "weights": [1.0, weight]}
    merged = matsmerge.merge([{"p": v} for v in pair], **options)["p"]
    turned = matsmerge.merge([{"p": rotation @ v} for v in pair], **options)["p"]
    torch.testing.assert_close(turned, rotation @ merged, rtol=1e-9, atol=1e-9)
    if method != "nuslerp":
        length = (pair[0].norm() + weight * pair[1].norm()) / (1 + weight)
        torch.testing.assert_close(merged.norm(), length, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nuslerp_of_identical_models(flatten: bool, dtype: torch.dtype) -> None:
    _, (model,) = models(1)
    model = {n: v.to(dtype) for n, v in model.items()}
    copy = {n: v.clone() for n, v in model.items()}
    merged = matsmerge.merge([model, copy], method="nuslerp", nuslerp_flatten=flatten)
    assert all(torch.equal(merged[n], model[n]) for n in model)


@pytest.mark.parametrize("flatten", [False, True])
def test_nuslerp_in_either_order(flatten: bool) -> None:
    _, (a, b) = models(2)
    one = matsmerge.merge([a, b], method="nuslerp", weights=[1, 3], nuslerp_flatten=flatten)
    two = matsmerge.merge([b, a], method="nuslerp", weights=[3, 1], nuslerp_flatten=flatten)
    for n in a:
        torch.testing.assert_close(one[n], two[n])
