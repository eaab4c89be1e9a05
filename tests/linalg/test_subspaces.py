"""Subspaces against projections and traces written out densely."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from matsmerge.linalg.subspaces import energies, find_directions, overlap, overlap_at_random, split

F64 = torch.float64


def random_orthogonal(d: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=F64))
    assert isinstance(q, Tensor)
    return q


def with_values(values: list[float], q: Tensor) -> Tensor:
    return q @ torch.diag(torch.tensor(values, dtype=F64)) @ q.T


def test_the_largest_come_first() -> None:
    q = random_orthogonal(4, 0)
    found = find_directions(with_values([1, 8, 2, 4], q))
    torch.testing.assert_close(found.values, torch.tensor([8, 4, 2, 1], dtype=F64))
    for i, column in enumerate((1, 3, 2, 0)):
        assert abs(float(found.vectors[:, i] @ q[:, column])) == pytest.approx(1)
    assert found.top(2).shape == (4, 2)


@pytest.mark.parametrize(
    ("energy", "num"),
    [(0.01, 1), (8 / 15, 1), (0.54, 2), (12 / 15, 2), (0.9, 3), (14 / 15, 3), (0.94, 4), (1.0, 4)],
)
def test_how_many_hold_a_share(energy: float, num: int) -> None:
    found = find_directions(with_values([1, 8, 2, 4], random_orthogonal(4, 1)))
    assert found.num_holding(energy) == num
    assert found.share(num) >= energy - 1e-9
    assert found.share(num - 1) < energy


def test_what_is_rounding_is_no_direction() -> None:
    rows = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    for gram in (rows.T @ rows, rows.double().T @ rows.double()):
        found = find_directions(gram)
        assert found.num_certain == 3
        assert found.num_holding(1.0) == 3
    nothing = find_directions(torch.zeros(5, 5))
    assert (nothing.num_certain, nothing.num_holding(0.9), nothing.share(2)) == (0, 0, 0.0)


def test_bfloat16_keeps_its_directions() -> None:
    """Of small inputs too: their entries are rounded relative to themselves."""
    rows = torch.randn(2000, 20, generator=torch.Generator().manual_seed(0))
    gram = (rows * torch.logspace(0, -2, 20)).T @ (rows * torch.logspace(0, -2, 20))
    found = find_directions(gram.bfloat16())
    assert found.num_certain == 20
    torch.testing.assert_close(found.values, find_directions(gram).values, rtol=0.05, atol=0.0)


@settings(max_examples=30)
@given(st.integers(1, 12), st.data())
def test_overlap_is_the_trace_of_two_projections(d: int, data: st.DataObject) -> None:
    num_a, num_b = data.draw(st.integers(1, d)), data.draw(st.integers(1, d))
    a, b = random_orthogonal(d, 1)[:, :num_a], random_orthogonal(d, 2)[:, :num_b]
    found = overlap(a, b)
    projections = float(torch.trace(a @ a.T @ b @ b.T))
    assert found == pytest.approx(projections / min(num_a, num_b))
    assert found == pytest.approx(overlap(b, a))
    cosines = torch.linalg.svdvals(a.T @ b)
    assert found == pytest.approx(float(cosines.square().mean()))
    turned = random_orthogonal(num_a, 3)  # the basis does not matter, only what it spans
    assert overlap(a @ turned, b) == pytest.approx(found)


def test_same_contained_and_orthogonal_subspaces() -> None:
    q = random_orthogonal(8, 0)
    assert overlap(q[:, :3], q[:, :3]) == pytest.approx(1)
    assert overlap(q[:, :3], q[:, :6]) == pytest.approx(1)
    assert overlap(q[:, :3], q[:, 3:]) == pytest.approx(0, abs=1e-14)
    assert math.isnan(overlap(q[:, :0], q))
    assert math.isnan(overlap_at_random(0, 3, 8))


@pytest.mark.parametrize(("num_a", "num_b"), [(1, 1), (3, 3), (2, 7), (10, 4)])
def test_overlap_at_random_is_the_mean(num_a: int, num_b: int) -> None:
    fixed = torch.eye(10, dtype=F64)[:, :num_a]
    drawn = [overlap(fixed, random_orthogonal(10, seed)[:, :num_b]) for seed in range(2000)]
    expected = overlap_at_random(num_a, num_b, 10)
    assert sum(drawn) / len(drawn) == pytest.approx(expected, abs=0.02)


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 10), st.integers(1, 15), st.data())
def test_a_change_splits(num_outputs: int, d: int, num_rows: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, d))
    generator = torch.Generator().manual_seed(d)
    z = torch.randn(num_rows, d, generator=generator, dtype=F64)
    change = torch.randn(num_outputs, d, generator=generator, dtype=F64)
    directions = find_directions(z.T @ z / num_rows)
    along = sum((energies(row, directions) for row in change.split(2)), torch.zeros(d, dtype=F64))
    found = split(along, directions, k)
    q = directions.top(k)
    projection = q @ q.T
    inside = change @ projection
    outside = change @ (torch.eye(d, dtype=F64) - projection)
    assert found.inside == pytest.approx(float(inside.norm()), abs=1e-12)
    assert found.outside == pytest.approx(float(outside.norm()), abs=1e-12)
    assert found.inside**2 + found.outside**2 == pytest.approx(float(change.square().sum()))
    outputs = z @ change.T
    assert found.at_outputs**2 == pytest.approx(float(outputs.square().sum(1).mean()))
