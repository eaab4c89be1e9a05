"""Low-rank factors and shared outputs against singular value decompositions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from matsmerge.linalg.low_rank import nearest_factors, shared_outputs

few = settings(max_examples=40, deadline=None)
F64 = torch.float64
sides = st.integers(1, 9)


def matrix(rows: int, columns: int, rank: int, seed: int) -> Tensor:
    """A matrix of a rank, or of its shorter side if that is less."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=generator, dtype=F64)
    return left @ torch.randn(rank, columns, generator=generator, dtype=F64)


def truncated(values: Tensor, rank: int) -> Tensor:
    u, s, vh = torch.linalg.svd(values.double(), full_matrices=False)
    nearest: Tensor = (u[:, :rank] * s[:rank]) @ vh[:rank]
    return nearest


@pytest.mark.parametrize("shape", [(5, 11), (11, 5), (7, 7), (1, 6), (6, 1)])
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_factors_are_those_of_the_largest_singular_values(
    shape: tuple[int, int], rank: int
) -> None:
    values = matrix(*shape, rank=12, seed=1)
    found = nearest_factors(values, rank)
    num = min(rank, *shape)
    assert found.left.shape == (shape[0], num)
    assert found.right.shape == (num, shape[1])
    torch.testing.assert_close(found.left @ found.right, truncated(values, rank))
    s = torch.linalg.svdvals(values)
    assert found.energy == pytest.approx(float(s[:rank].square().sum() / s.square().sum()))
    # Each direction's norm is split evenly.
    torch.testing.assert_close(found.left.norm(dim=0), s[:num].sqrt())
    torch.testing.assert_close(found.right.norm(dim=1), s[:num].sqrt())


@few
@given(sides, sides, st.integers(0, 9), st.integers(1, 12), st.integers(0, 2**31))
def test_no_matrix_of_the_rank_is_nearer(
    rows: int, columns: int, own_rank: int, rank: int, seed: int
) -> None:
    """Also where the matrix has a lower rank than asked for, or fewer rows or columns."""
    values = matrix(rows, columns, own_rank, seed)
    found = nearest_factors(values, rank)
    s = torch.linalg.svdvals(values)
    distance = float((values - found.left @ found.right).norm())
    assert distance == pytest.approx(float(s[rank:].norm()), abs=1e-7 * (1 + float(s.norm())))
    assert found.left.shape[1] == min(rank, rows, columns)
    total = float(s.square().sum())
    assert found.energy == pytest.approx(float(s[:rank].square().sum()) / total if total else 1.0)
    assert found.energy <= 1


@pytest.mark.parametrize("rank", [2, 20])
def test_no_change_has_factors_of_zero(rank: int) -> None:
    found = nearest_factors(torch.zeros(4, 6), rank)
    assert found.energy == 1.0
    assert torch.equal(found.left @ found.right, torch.zeros(4, 6, dtype=F64))


def test_small_singular_values_are_not_lost() -> None:
    """Squaring in float64 leaves more of them than float32 has digits for."""
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(12, 6, generator=generator, dtype=F64))[0]
    v = torch.linalg.qr(torch.randn(20, 6, generator=generator, dtype=F64))[0]
    values = ((u * torch.logspace(0, -6, 6, dtype=F64)) @ v.mT).float()
    found = nearest_factors(values, 6)
    product = found.left.float() @ found.right.float()
    torch.testing.assert_close(product, values, rtol=0, atol=3e-7)
    torch.testing.assert_close(
        found.left.norm(dim=0).square(),
        torch.linalg.svdvals(values.double())[:6],
        rtol=1e-3,
        atol=0,
    )


def random_pairs(
    rows: int, columns: int, ranks: list[int], seed: int
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, r, generator=generator, dtype=F64),
            torch.randn(r, columns, generator=generator, dtype=F64),
        )
        for r in ranks
    ]


@pytest.mark.parametrize(
    ("rows", "columns", "ranks"),
    [
        (9, 7, [2, 3]),
        (9, 30, [1]),
        (4, 9, [3, 3, 3]),  # more than there are rows
        (9, 2, [3, 4]),  # a rank above the number of columns
    ],
)
def test_shared_outputs_are_left_singular_vectors(
    rows: int, columns: int, ranks: list[int]
) -> None:
    pairs = random_pairs(rows, columns, ranks, seed=2)
    found = shared_outputs([left for left, _ in pairs], [right for _, right in pairs])
    joined = torch.cat([left @ right for left, right in pairs], dim=1)
    num = min(sum(ranks), rows)
    assert found.shape == (rows, num)
    torch.testing.assert_close(found.mT @ found, torch.eye(num, dtype=F64))
    torch.testing.assert_close(found @ (found.mT @ joined), joined)
    u, s, _ = torch.linalg.svd(joined, full_matrices=False)
    num_certain = int((s > 1e-9 * s[0]).sum())
    signs = (found[:, :num_certain] * u[:, :num_certain]).sum(0)
    torch.testing.assert_close(signs.abs(), torch.ones(num_certain, dtype=F64))
    torch.testing.assert_close(
        (found.mT @ joined).norm(dim=1)[: len(s)], s[:num], atol=1e-7, rtol=1e-7
    )


@few
@given(
    sides,
    sides,
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_shared_outputs_span_all(
    rows: int, columns: int, ranks: list[int], repeats: bool, seed: int
) -> None:
    """Also with factors that depend on each other, or are zero."""
    pairs = random_pairs(rows, columns, ranks, seed)
    if repeats:
        pairs = [*pairs, pairs[0], (torch.zeros(rows, 2, dtype=F64), torch.ones(2, columns))]
    found = shared_outputs([left for left, _ in pairs], [right for _, right in pairs])
    num = min(sum(left.shape[1] for left, _ in pairs), rows)
    assert found.shape == (rows, num)
    torch.testing.assert_close(found.mT @ found, torch.eye(num, dtype=F64))
    for left, right in pairs:
        change = left @ right.double()
        torch.testing.assert_close(found @ (found.mT @ change), change)
