"""Sketches against the matrices they are of, in float64."""

import pytest
import torch
from torch import Tensor

from matsmerge.linalg.nystrom import (
    directions,
    factor,
    least_dim,
    num_directions,
    sketch_of_factor,
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
    assert not torch.equal(omega, directions(70, 5, seed=1))
    # Fewer columns or rows are the first of more, also beyond a word of bits.
    assert torch.equal(directions(70, 3), omega[:, :3])
    assert torch.equal(directions(30, 5), omega[:30])
    assert float(directions(1000, 40).mean().abs()) < 0.02


def test_a_moment_of_few_directions_is_exact() -> None:
    matrix = moment(torch.cat([torch.arange(1.0, 11), torch.zeros(DIM - 10)]))
    b = factor(sketched(matrix))
    torch.testing.assert_close(b @ b.mT, matrix, rtol=0, atol=1e-10)
    kept = truncate_factor(b, float(matrix.trace()))
    torch.testing.assert_close(kept.dense(), matrix, rtol=0, atol=1e-10)
    assert kept.rest < 1e-10


def test_it_does_the_same_to_the_directions_and_is_below_the_moment() -> None:
    matrix = moment(0.7 ** torch.arange(DIM))
    y = sketched(matrix)
    b = factor(y)
    torch.testing.assert_close(sketch_of_factor(b), y, rtol=0, atol=1e-12)
    torch.testing.assert_close(sketch_of_factor(b, 6), y[:, :6], rtol=0, atol=1e-12)
    assert float(torch.linalg.eigvalsh(matrix - b @ b.mT)[0]) > -1e-12
    gram = b.mT @ b  # orthogonal columns, the longest first
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-12)
    assert bool((gram.diagonal().diff() <= 0).all())
    # Against the formula as it is written.
    omega = directions(DIM, NUM).double()
    plain = y @ torch.linalg.solve(omega.mT @ y, y.mT)
    torch.testing.assert_close(b @ b.mT, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("decay", [0.6, 0.8])
def test_leading_directions_of_a_decaying_spectrum_are_found(decay: float) -> None:
    matrix = moment(decay ** torch.arange(200))
    rank = 24
    best = truncate(matrix, rank - 8)  # the last directions of a sketch are the least accurate
    for dtype, precision in ((torch.float64, 0.0), (torch.bfloat16, 2.0**-8)):
        kept = truncate_factor(factor(sketched(matrix, rank)).to(dtype), float(matrix.trace()))
        torch.testing.assert_close(
            kept.vectors.mT @ kept.vectors, torch.eye(rank, dtype=torch.float64)
        )
        assert kept.trace == pytest.approx(float(matrix.trace()), rel=1e-12)
        # What the subspace holds of the moment, and the values it says this has.
        held = float((kept.vectors.mT @ matrix @ kept.vectors).trace())
        assert held > 0.99 * float(best.values.sum())
        assert float(kept.values.sum()) == pytest.approx(held, rel=0.03)
        allowed = 2 * float((best.dense() - matrix).norm()) + precision * float(matrix.norm())
        assert float((kept.dense() - matrix).norm()) < allowed


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5])
def test_values_that_a_sketch_underestimates_are_put_right(power: float) -> None:
    """Of spectra that fall slowly, which is where sketches lack much of what they hold."""
    rank, dim = 24, 200
    matrix = moment(torch.arange(1, dim + 1) ** -power)
    trace = float(matrix.trace())
    b = factor(sketched(matrix, rank))
    low = b.square().sum(0)
    kept = truncate_factor(b, trace)
    assert kept.rest > 0
    assert kept.trace == pytest.approx(trace)
    held = float((kept.vectors.mT @ matrix @ kept.vectors).trace())
    assert float(low.sum()) < 0.93 * held
    assert float(kept.values.sum()) == pytest.approx(held, rel=0.12)
    as_it_is = Truncated(kept.vectors, low, (trace - float(low.sum())) / (dim - rank))
    assert (kept.dense() - matrix).norm() < (as_it_is.dense() - matrix).norm()


def test_sums_in_float32_are_stable() -> None:
    """Far fewer rows than directions, and inputs of one huge coordinate."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, DIM, generator=generator)
    rows[:, 3] *= 1e3
    omega = directions(DIM, NUM)
    b = factor((rows.mT @ (rows @ omega)).double())
    exact = rows.double().mT @ rows.double()
    torch.testing.assert_close(b @ b.mT, exact, rtol=0, atol=1e-4 * float(exact.norm()))
    assert truncate_factor(b, float(exact.trace())).rest >= 0


def test_nothing_and_what_is_not_finite() -> None:
    assert not factor(torch.zeros(DIM, NUM)).any()
    broken = sketched(moment(torch.ones(DIM)))
    broken[1, 2] = torch.inf
    assert bool(factor(broken).isnan().all())


def test_where_a_sketch_is_smaller() -> None:
    for rank in (1, 4, 32):
        least = least_dim(rank)
        assert num_directions(least - 1, rank) is None
        assert num_directions(least, rank) == rank
        assert least * (rank + 1) < least * (least + 1) / 2


def test_directions_are_independent() -> None:
    """So that some shift is enough; of more rows they are if they are of fewer."""
    for rank in range(1, 65):
        dim = least_dim(rank)
        assert int(torch.linalg.matrix_rank(directions(dim, rank))) == rank
