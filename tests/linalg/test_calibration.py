"""Calibrated singular values, against sums over directions and models that are written out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from matsmerge.linalg.calibration import calibrate

Array = NDArray[np.float64]


def calibrated(change: Array, changes: list[Array], alpha: float) -> Array:
    """Direction by direction and model by model."""
    result = np.zeros_like(change)
    u, s, v = np.linalg.svd(change, full_matrices=False)
    for r in range(len(s)):
        divisor = 0.0
        for other in changes:
            merged, own = u[:, r] @ change, u[:, r] @ other
            divisor += max(float(merged @ own) / float(own @ own), alpha) / len(changes)
        result += s[r] / divisor * np.outer(u[:, r], v[r])
    return result


def draw(seed: int, num: int, shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, *shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("least", [1.0, 0.15, 3.0])
@pytest.mark.parametrize("shape", [(5, 8), (9, 4), (6, 6)])
def test_formula(shape: tuple[int, int], least: float) -> None:
    changes = draw(0, 3, shape)
    merged = 0.7 * changes.sum(0)
    found = merged + calibrate(merged, changes, least)
    expected = calibrated(merged.numpy(), list(changes.numpy()), least / 3)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), num=st.integers(1, 5), scale=st.floats(0.5, 3))
def test_what_all_models_share_is_counted_once(seed: int, num: int, scale: float) -> None:
    """Copies that were added up come back as one, whatever they were scaled by."""
    change = draw(seed, 1, (4, 6))[0]
    merged = max(scale, 1.0) * num * change
    found = merged + calibrate(merged, [change] * num)
    torch.testing.assert_close(found, change, rtol=1e-9, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_singular_values_only_shrink_where_all_count_fully(seed: int) -> None:
    changes = draw(seed, 3, (5, 7))
    merged = changes.sum(0)
    found = merged + calibrate(merged, changes, 3.0)
    before, after = torch.linalg.svdvals(merged), torch.linalg.svdvals(found)
    assert bool((after <= before * (1 + 1e-9)).all())


def test_a_model_that_changes_nothing_counts_with_the_least() -> None:
    change = draw(1, 1, (4, 6))[0]
    found = change + calibrate(change, [change, torch.zeros_like(change)], 1.0)
    torch.testing.assert_close(found, change / 0.75, rtol=1e-12, atol=1e-12)
    assert torch.equal(calibrate(0 * change, [0 * change] * 2), 0 * change)
