"""Sketches against the matrices they are of, in float64."""

import math

import pytest
import torch
from torch import Tensor

from matsmerge.linalg.nystrom import (
    along_directions,
    directions,
    factor,
    is_smaller,
    leading_of_moment,
    leading_of_sketch,
    leading_of_sum,
    least_dim,
    num_columns,
    truncate_factor,
)
from matsmerge.linalg.truncated import Truncated, truncate

DIM, NUM = 60, 14
FIRST_SIGNS = "++-++--+---++-++--+--+++"


def moment(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A matrix of these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(len(eigenvalues), len(eigenvalues), generator=generator).double()
    q: Tensor = torch.linalg.qr(square).Q
    return (q * eigenvalues.double()) @ q.mT


def sketched(matrix: Tensor, num: int = NUM) -> Tensor:
    return matrix @ directions(len(matrix), num).double()


def test_directions_are_signs_that_never_change() -> None:
    omega = directions(70, 5)
    assert set(omega.flatten().tolist()) == {1.0, -1.0}
    # Of the first words of Philox 4x64 with ten rounds, on any machine.
    assert "".join("+" if x > 0 else "-" for x in omega[:24, 0].tolist()) == FIRST_SIGNS
    # Fewer rows are the first of more, also beyond a word of bits.
    assert torch.equal(directions(30, 5), omega[:30])
    assert float(directions(1000, 40).mean().abs()) < 0.02


@pytest.mark.parametrize(("num", "num_groups"), [(63, 1), (64, 2), (99, 3), (128, 4), (301, 4)])
def test_directions_are_of_groups(num: int, num_groups: int) -> None:
    omega = directions(1000, num)
    has = omega != 0
    assert set(omega[has].tolist()) == {1.0, -1.0}
    # Sixteen neighbours have the same columns, and those of other groups none in common with them.
    assert torch.equal(has, has[::16].repeat_interleave(16, 0)[:1000])
    alike = has[::16].float() @ has[::16].float().mT > 0
    assert torch.equal(alike, (torch.arange(63)[:, None] - torch.arange(63)) % num_groups == 0)
    each = num // num_groups, -(-num // num_groups)
    assert set(has.sum(1).tolist()) == set(each)
    assert torch.equal(directions(500, num), omega[:500])


@pytest.mark.parametrize("num", [5, 64, 99, 128])
@pytest.mark.parametrize("dim", [256, 257, 1000])
def test_rows_along_directions(dim: int, num: int) -> None:
    rows = torch.randn(7, dim, dtype=torch.float64)
    expected = (rows @ directions(dim, num).double()).mT
    torch.testing.assert_close(along_directions(rows, num), expected)


def test_a_moment_of_few_directions_is_exact() -> None:
    matrix = moment(torch.cat([torch.arange(1.0, 11), torch.zeros(DIM - 10)]))
    trace = float(matrix.trace())
    for b in (leading_of_sketch(sketched(matrix), trace, 12), leading_of_moment(matrix, 12)):
        assert b.shape == (DIM, 12)
        torch.testing.assert_close(b @ b.mT, matrix, rtol=0, atol=1e-10)
        kept = truncate_factor(b, trace)
        torch.testing.assert_close(kept.dense(), matrix, rtol=0, atol=1e-10)
        assert kept.rest < 1e-10


def test_a_factor_is_of_the_formula_and_below_the_moment() -> None:
    matrix = moment(0.7 ** torch.arange(DIM))
    y = sketched(matrix)
    b = factor(y)
    assert float(torch.linalg.eigvalsh(matrix - b @ b.mT)[0]) > -1e-12
    gram = b.mT @ b  # orthogonal columns, the longest first
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-12)
    assert bool((gram.diagonal().diff() <= 0).all())
    omega = directions(DIM, NUM).double()
    plain = y @ torch.linalg.solve(omega.mT @ y, y.mT)
    torch.testing.assert_close(b @ b.mT, plain, rtol=0, atol=1e-10)
    # With fewer directions these are the first, with larger values.
    lengths = leading_of_sketch(y, float(matrix.trace()), 5).norm(dim=0)
    assert bool((lengths > b.norm(dim=0)[:5]).all())


@pytest.mark.parametrize("decay", [0.6, 0.8, 0.95])
def test_leading_directions_of_a_decaying_spectrum_are_found(decay: float) -> None:
    matrix = moment(decay ** torch.arange(300))
    trace = float(matrix.trace())
    rank = 24
    num = num_columns(300, rank)
    assert num == 2 * rank
    best = truncate(matrix, rank)
    for dtype, precision in ((torch.float64, 0.0), (torch.bfloat16, 2.0**-8)):
        b = leading_of_sketch(sketched(matrix, num), trace, rank)
        kept = truncate_factor(b.to(dtype), trace)
        torch.testing.assert_close(
            kept.vectors.mT @ kept.vectors, torch.eye(rank, dtype=torch.float64)
        )
        assert kept.trace == pytest.approx(trace, rel=1e-12)
        # What the subspace holds of the moment, and the values it says this has.
        held = float((kept.vectors.mT @ matrix @ kept.vectors).trace())
        assert held > 0.975 * float(best.values.sum())
        assert float(kept.values.sum()) == pytest.approx(held, rel=0.04)
        allowed = 1.6 * float((best.dense() - matrix).norm()) + precision * float(matrix.norm())
        assert float((kept.dense() - matrix).norm()) < allowed


def test_single_numbers_that_stand_out_are_found() -> None:
    """Each is in one group alone, which must have columns enough for all of its own."""
    generator = torch.Generator().manual_seed(0)
    diagonal = torch.full((1000,), 0.01, dtype=torch.float64)
    large = torch.randperm(1000, generator=generator)[:64]
    diagonal[large] = torch.linspace(1, 2, 64, dtype=torch.float64)
    matrix, trace = torch.diag(diagonal), float(diagonal.sum())
    kept = truncate_factor(leading_of_sketch(sketched(matrix, 128), trace, 64), trace)
    held = float((kept.vectors.mT @ matrix @ kept.vectors).trace())
    assert held > 0.97 * float(diagonal[large].sum())


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5])
def test_values_that_a_sketch_underestimates_are_put_right(power: float) -> None:
    """Of spectra that fall slowly, which is where sketches lack much of what they hold."""
    rank, dim = 24, 300
    matrix = moment(torch.arange(1, dim + 1) ** -power)
    trace = float(matrix.trace())
    y = sketched(matrix, 2 * rank)
    low = factor(y).square().sum(0)[:rank]
    kept = truncate_factor(leading_of_sketch(y, trace, rank), trace)
    assert kept.rest > 0
    assert kept.trace == pytest.approx(trace)
    held = float((kept.vectors.mT @ matrix @ kept.vectors).trace())
    assert float(low.sum()) < 0.97 * held
    assert float(kept.values.sum()) == pytest.approx(held, rel=0.12)
    as_it_is = Truncated(kept.vectors, low, (trace - float(low.sum())) / (dim - rank))
    assert (kept.dense() - matrix).norm() < (as_it_is.dense() - matrix).norm()


@pytest.mark.parametrize("smallest", [1e-1, 1e-9])
def test_directions_are_orthonormal_however_short_some_columns_are(smallest: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(DIM, NUM, generator=generator).double()).Q
    turn = torch.linalg.qr(torch.randn(NUM, NUM, generator=generator).double()).Q
    b = (q * torch.logspace(0, math.log10(smallest), NUM, dtype=torch.float64)) @ turn
    kept = truncate_factor(b, 2 * float(b.square().sum()))
    ones = torch.eye(NUM, dtype=torch.float64)
    torch.testing.assert_close(kept.vectors.mT @ kept.vectors, ones, rtol=0, atol=1e-12)
    found = (kept.vectors * kept.values) @ kept.vectors.mT
    torch.testing.assert_close(found, b @ b.mT, rtol=0, atol=1e-13)


def test_leading_directions_of_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(DIM, 6, generator=generator).double() for _ in range(3)]
    b = leading_of_sum(parts)
    best = truncate(sum((part @ part.mT for part in parts), torch.zeros(DIM, DIM)), 6)
    expected = (best.vectors * best.values) @ best.vectors.mT
    torch.testing.assert_close(b @ b.mT, expected, rtol=0, atol=1e-10)


def test_sums_in_float32_are_stable() -> None:
    """Far fewer rows than directions, and inputs of one huge coordinate."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, DIM, generator=generator)
    rows[:, 3] *= 1e3
    omega = directions(DIM, NUM)
    exact = rows.double().mT @ rows.double()
    trace = float(exact.trace())
    b = leading_of_sketch((rows.mT @ (rows @ omega)).double(), trace, 7)
    torch.testing.assert_close(b @ b.mT, exact, rtol=0, atol=1e-4 * float(exact.norm()))
    assert truncate_factor(b, trace).rest >= 0


def test_nothing_and_what_is_not_finite() -> None:
    assert not leading_of_sketch(torch.zeros(DIM, NUM), 0.0, 7).any()
    matrix = moment(torch.ones(DIM))
    matrix[1, 2] = torch.inf
    assert bool(leading_of_sketch(sketched(matrix), 1.0, 7).isnan().all())
    assert bool(leading_of_moment(matrix, 7).isnan().all())


def test_where_a_sketch_is_smaller_and_where_it_is_less_work() -> None:
    for rank in (1, 4, 32):
        least = least_dim(rank)
        assert not is_smaller(least - 1, rank)
        assert is_smaller(least, rank)
        assert least * (rank + 1) < least * (least + 1) / 2
        assert num_columns(8 * rank, rank) is None  # half of d columns, against twice 2 r
        assert num_columns(8 * rank + 1, rank) == 2 * rank


def test_directions_are_independent() -> None:
    """So that some shift is enough; of more rows they are if they are of fewer."""
    for num in range(2, 129, 2):
        assert int(torch.linalg.matrix_rank(directions(4 * num, num))) == num
