"""Trajectories in the eigenbasis against conjugate gradients in 300 decimal digits.

Plain float64 conjugate gradients are no yardstick: their residuals lose orthogonality after a dozen
iterations already on matrices of condition 1e6. Even 60 digits do not last for 24 iterations.
"""

import decimal
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_matrices import normal, seeded, spread
from torch import Tensor

from matsmerge.linalg.conjugate_gradients import conjugate_gradients
from matsmerge.linalg.eigenbasis import (
    decompose,
    dense,
    follow_trajectory,
    is_gram,
    is_worth_it,
    solve_by_flow,
)
from matsmerge.linalg.operators import (
    Diagonal,
    Gram,
    Identity,
    Kronecker,
    LowRank,
    Operator,
    Sum,
)
from matsmerge.linalg.rounding import rounding_level
from matsmerge.linalg.system import Limits, Solution, Status, System, make_system

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 2**31)
F64 = torch.float64
NUM_DIGITS = 300


def exact_iterates(matrix: Tensor, residual: Tensor, iterations: int) -> list[Tensor]:
    """Hestenes and Stiefel's recursion for D A = R on the whole matrix D, in 300 digits."""
    with decimal.localcontext(decimal.Context(prec=NUM_DIGITS)):
        exactly = np.vectorize(lambda value: decimal.Decimal(float(value)), otypes=[object])
        a, r = exactly(matrix.numpy()), exactly(residual.numpy())
        d, p, rr = 0 * r, r, (r * r).sum()
        iterates = [torch.zeros_like(residual)]
        for _ in range(iterations):
            q = p @ a
            alpha = rr / (p * q).sum()
            d, r = d + alpha * p, r - alpha * q
            previous, rr = rr, (r * r).sum()
            p = r + rr / previous * p
            iterates.append(torch.tensor(d.astype(float)))
    return iterates


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def gram_case(
    seed: int, num_models: int, shape: Sequence[int], condition: float
) -> tuple[list[Tensor], list[Tensor], Tensor, System]:
    generator = seeded(seed)
    *groups, _, num_in = shape
    grams = []
    for _ in range(num_models):
        blocks = [spread(generator, num_in, condition) for _ in range(groups[0] if groups else 1)]
        grams.append(torch.stack(blocks) if groups else blocks[0])
    start = normal(generator, *shape)
    weights = [start + normal(generator, *shape) for _ in grams]
    return grams, weights, start, make_system(zip(map(Gram, grams), weights, strict=True), start)


def objective(grams: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor) -> float:
    terms = zip(grams, weights, strict=True)
    return float(sum(0.5 * ((x - w) * ((x - w) @ g)).sum() for g, w in terms))


def follow(system: System, limits: Limits, held_out: System | None = None) -> Solution:
    return follow_trajectory(system, decompose(dense(system.operator), F64), limits, held_out)


# The decomposition


@few
@given(seeds, st.integers(0, 2), st.integers(1, 12), st.integers(1, 12))
def test_decomposition_tells_rounding_from_data(
    seed: int, num_groups: int, num_in: int, num_rows: int
) -> None:
    generator = seeded(seed)
    rows = normal(generator, *((num_groups,) if num_groups else ()), num_rows, num_in)
    exact = rows.mT @ rows
    basis = decompose(exact.float().double(), torch.float32)
    rebuilt = (basis.vectors * basis.values.unsqueeze(-2)) @ basis.vectors.mT
    torch.testing.assert_close(rebuilt, exact, rtol=0, atol=1e-6 * float(exact.norm()))
    eye = torch.eye(num_in, dtype=F64).expand_as(exact)
    torch.testing.assert_close(basis.vectors.mT @ basis.vectors, eye, rtol=0, atol=1e-12)
    num_without_data = max(num_in - num_rows, 0) * max(num_groups, 1)
    assert basis.num_null >= num_without_data
    assert bool((basis.values >= 0).all())
    if num_without_data:
        largest = torch.linalg.eigvalsh(exact).amax(-1)
        assert abs(basis.lowest) <= float((basis.rounding / largest).max())


def test_rounding_level_bounds_what_rounding_does_to_eigenvalues() -> None:
    generator = seeded(0)
    for d in (2, 10, 60):
        rows = normal(generator, d // 2, d)
        matrix = rows.T @ rows
        for dtype in (torch.float32, torch.bfloat16):
            moved = torch.linalg.eigvalsh(matrix.to(dtype).double()) - torch.linalg.eigvalsh(matrix)
            assert float(moved.abs().max()) < rounding_level(matrix, dtype)
            assert float(moved.abs().max()) > 1e-3 * rounding_level(matrix, dtype)


# Iterates


@few
@given(
    seeds,
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 6),
    st.integers(12, 20),
    st.floats(2, 50),
)
def test_equals_plain_conjugate_gradients_while_those_are_right(
    seed: int, num_models: int, num_groups: int, num_out: int, num_in: int, condition: float
) -> None:
    """A dozen iterations at a condition below 50: plain float64 has not lost orthogonality yet."""
    shape = (num_groups, num_out, num_in) if num_groups else (num_out, num_in)
    _, _, _, system = gram_case(seed, num_models, shape, condition)
    limits = Limits(12, keep=range(13))
    ours, plain = follow(system, limits), conjugate_gradients(system, limits)
    assert ours.iterations == plain.iterations == 12
    for at in range(1, 13):
        assert distance(ours.kept[at], plain.kept[at]) < 1e-6
    assert not ours.kept[0].any()
    assert torch.equal(ours.correction, ours.kept[12])
    np.testing.assert_allclose(ours.trace.residuals, plain.trace.residuals, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        ours.trace.objectives, plain.trace.objectives, rtol=1e-6, atol=1e-13 * system.objective
    )


@pytest.mark.parametrize("num_models", [1, 4])
@pytest.mark.parametrize("condition", [1e4, 1e6, 1e8, 1e10])
def test_ill_conditioned_iterates_are_exact(condition: float, num_models: int) -> None:
    d, iterations = 24, 24
    grams, _, _, system = gram_case(0, num_models, (4, d), condition)
    exact = exact_iterates(sum(grams[1:], grams[0]), system.residual, iterations)
    limits = Limits(iterations, keep=range(1, iterations + 1))
    solution = follow(system, limits)
    for at in range(1, iterations):
        assert distance(solution.kept[at], exact[at]) < 1e-6
    # With as many iterations as inputs, it is the solution.
    assert distance(solution.correction, exact[-1]) < 1e-6
    assert solution.status is Status.CONVERGED
    # What makes the case a hard one: plain float64 conjugate gradients are nowhere near.
    if num_models == 1:
        plain = conjugate_gradients(system, limits)
        assert max(distance(plain.kept[at], exact[at]) for at in limits.keep) > 0.05


def test_groups_share_one_recursion() -> None:
    grams, _, _, system = gram_case(0, 2, (3, 2, 6), 1e6)
    blocks = torch.block_diag(*(grams[0] + grams[1]))
    # Side by side, the groups' rows are rows of a matrix with as many rows as a group has.
    side_by_side = system.residual.transpose(0, 1).reshape(2, 18)
    exact = exact_iterates(blocks, side_by_side, 15)
    solution = follow(system, Limits(15, keep=range(1, 16)))
    for at in range(1, 16):
        expected = exact[at].view(2, 3, 6).transpose(0, 1)
        assert distance(solution.kept[at], expected) < 1e-6


def test_rounding_of_singular_grams_stays_out() -> None:
    """Iterates on float32 Grams of few rows are those on the Grams before rounding."""
    generator = seeded(0)
    num_in, num_rows = 40, 8
    start = normal(generator, 4, num_in)
    weights = [start + normal(generator, 4, num_in) for _ in range(2)]
    rows = [normal(generator, num_rows, num_in) for _ in weights]
    grams = [z.T @ z / num_rows for z in rows]
    rounded = [Gram(g.float().double()) for g in grams]
    residual = sum(((w - start) @ g for w, g in zip(weights, grams, strict=True)), 0 * start)
    exact = exact_iterates(grams[0] + grams[1], residual, 12)
    system = make_system(zip(rounded, weights, strict=True), start)
    basis = decompose(dense(system.operator), torch.float32)
    assert basis.num_null == num_in - 2 * num_rows
    solution = follow_trajectory(system, basis, Limits(5000, keep=range(1, 13)))
    for at in range(1, 13):
        assert distance(solution.kept[at], exact[at]) < 1e-4
    null_space = torch.linalg.svd(torch.cat(rows), full_matrices=True).Vh[2 * num_rows :].T
    assert float((solution.correction @ null_space).norm()) < 1e-5 * float(
        solution.correction.norm()
    )
    assert solution.status is Status.CONVERGED
    assert solution.iterations <= 2 * num_rows + 4
    assert solution.residual < 1e-6


# What is reported


@few
@given(seeds, st.integers(1, 4), st.integers(0, 2), st.floats(2, 1e6))
def test_trace_is_that_of_the_dense_system(
    seed: int, num_models: int, num_groups: int, condition: float
) -> None:
    shape = (num_groups, 3, 10) if num_groups else (3, 10)
    grams, weights, start, system = gram_case(seed, num_models, shape, condition)
    solution = follow(system, Limits(9, keep=range(10)))
    right = sum((w @ g for w, g in zip(weights, grams, strict=True)), 0 * start)
    before = objective(grams, weights, start)
    for at, correction in solution.kept.items():
        x = start + correction
        left = right - sum((x @ g for g in grams), 0 * start)
        # Iterates on the way are rounded to float32, and so is the norm that residuals are relative to.
        expected = float(left.norm() / right.norm())
        assert solution.trace.residuals[at] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        expected = objective(grams, weights, x)
        assert solution.trace.objectives[at] == pytest.approx(expected, abs=1e-6 * before)
    assert len(solution.trace.objectives) == len(solution.trace.residuals) == 10
    falls = -np.diff(solution.trace.objectives)
    assert (falls > -1e-13 * before).all()
    assert solution.residual == solution.trace.residuals[-1]
    assert solution.objective == solution.trace.objectives[-1]


def test_tolerance_stops_at_the_first_iterate_below_it() -> None:
    _, _, _, system = gram_case(0, 2, (3, 30), 1e3)
    everything = follow(system, Limits(30))
    tolerance = everything.trace.residuals[7] * 1.0001
    first = next(at for at, r in enumerate(everything.trace.residuals) if r <= tolerance)
    solution = follow(system, Limits(30, tolerance=tolerance, keep=[2, 29]))
    assert solution.status is Status.CONVERGED
    assert solution.iterations == first
    assert solution.residual <= tolerance
    assert torch.equal(solution.kept[29], solution.correction)
    assert not torch.equal(solution.kept[2], solution.correction)


def test_out_of_iterations_is_finished() -> None:
    _, _, _, system = gram_case(0, 2, (3, 30), 1e3)
    solution = follow(system, Limits(5))
    assert solution.status is Status.FINISHED
    assert solution.iterations == 5
    assert solution.kept == {}


def test_a_start_that_solves_the_system_is_left_alone() -> None:
    grams, weights, _, _ = gram_case(0, 3, (3, 5), 10)
    system = make_system([(Gram(g), weights[0]) for g in grams], weights[0])
    solution = follow(system, Limits(5, keep=[0, 5]))
    assert solution.status is Status.EXACT
    assert solution.iterations == 0
    assert not solution.correction.any()
    assert set(solution.kept) == {0, 5}


def test_no_data_at_all_changes_nothing() -> None:
    system = make_system(
        [(Gram(torch.zeros(4, 4)), torch.ones(2, 4, dtype=F64))], torch.zeros(2, 4)
    )
    solution = follow(system, Limits(5))
    assert not solution.correction.any()
    assert solution.status is Status.EXACT


# Held-out data


def held_out_case(
    seed: int, shape: Sequence[int], low_rank: bool
) -> tuple[list[Tensor], list[Tensor], Tensor, System, System]:
    """Grams of few examples, and others of the same distribution for the held-out objective."""
    generator = seeded(seed)
    *groups, _, num_in = shape
    scales = torch.arange(1, num_in + 1, dtype=F64) ** -1.0
    start = normal(generator, *shape)
    weights = [start + normal(generator, *shape) for _ in range(3)]

    def rows() -> list[Tensor]:
        return [normal(generator, *groups, num_in + 5, num_in) * scales for _ in weights]

    def system_of(rows: Sequence[Tensor]) -> System:
        operators: list[Operator] = [
            LowRank(z, 1 / z.shape[-2]) if low_rank else Gram(z.mT @ z / z.shape[-2]) for z in rows
        ]
        return make_system(zip(operators, weights, strict=True), start)

    seen, unseen = rows(), rows()
    grams = [z.mT @ z / z.shape[-2] for z in unseen]
    return grams, weights, start, system_of(seen), system_of(unseen)


@few
@given(seeds, st.integers(0, 2), st.booleans())
def test_held_out_objective_picks_the_iterate(seed: int, num_groups: int, low_rank: bool) -> None:
    shape = (num_groups, 4, 20) if num_groups else (4, 20)
    grams, weights, start, system, unseen = held_out_case(seed, shape, low_rank and not num_groups)
    keep = range(21)
    everything = follow(system, Limits(20, keep=keep))
    expected = [objective(grams, weights, start + everything.kept[at]) for at in keep]
    solution = follow(system, Limits(20, keep=keep), unseen)
    # Iterates on the way are rounded to float32.
    np.testing.assert_allclose(solution.trace.held_out, expected, rtol=1e-5)
    best = int(np.argmin(solution.trace.held_out))
    assert expected[best] == pytest.approx(min(expected), rel=1e-5)
    assert solution.iterations == best
    torch.testing.assert_close(solution.correction, everything.kept[best], rtol=1e-5, atol=1e-5)
    assert solution.status is (Status.HELD_OUT if best < 20 else Status.FINISHED)
    assert solution.residual == solution.trace.residuals[best]
    assert solution.objective == solution.trace.objectives[best]
    # Iterates after it are not to be had: what is kept there is the best one.
    for at in keep:
        expected_at = everything.kept[min(at, best)]
        torch.testing.assert_close(solution.kept[at], expected_at, rtol=1e-5, atol=1e-5)


def test_held_out_data_can_ask_for_an_early_stop() -> None:
    stops = set()
    for seed in range(10):
        _, _, _, system, unseen = held_out_case(seed, (4, 20), low_rank=False)
        stops.add(follow(system, Limits(20), unseen).iterations)
    assert min(stops) < 20
    assert len(stops) > 1


# Which operators, and when


def test_dense_matrices_of_gram_like_operators() -> None:
    generator = seeded(0)
    g, z = spread(generator, 4, 10), normal(generator, 2, 4)
    torch.testing.assert_close(dense(Gram(g)), g)
    torch.testing.assert_close(dense(LowRank(z, 0.5)), 0.5 * z.T @ z)
    total = LowRank(z, 0.5) + Gram(g) + LowRank(2 * z)
    torch.testing.assert_close(dense(total), g + 4.5 * z.T @ z)


GRAM_LIKE: list[tuple[Operator, bool]] = [
    (Gram(torch.eye(2)), True),
    (LowRank(torch.ones(1, 2)), True),
    (LowRank(torch.ones(1, 2)) + Gram(torch.eye(2)), True),
    (Identity(), False),
    (Diagonal(torch.ones(2)), False),
    (Kronecker(torch.eye(3), torch.eye(2)), False),
    (Sum((Gram(torch.eye(2)), Diagonal(torch.ones(2)))), False),
]


@pytest.mark.parametrize(("operator", "expected"), GRAM_LIKE)
def test_which_operators_are_grams(operator: Operator, expected: bool) -> None:
    assert is_gram(operator) is expected


def test_the_eigenbasis_is_for_many_rows_and_iterations() -> None:
    assert is_worth_it(1024, 1024, 100, 10)
    assert is_worth_it(1024, 2816, 100, 10)
    assert not is_worth_it(1, 1024, 100, 1)  # a vector
    assert not is_worth_it(64, 4096, 5, 1)
    assert is_worth_it(64, 4096, 100, 1, num_sharing=3)


# --- Gradient flow -------------------------------------------------------------------------------


@few
@given(seed=seeds, time=st.floats(0, 50))
def test_gradient_flow(seed: int, time: float) -> None:
    """D(t) = R A^-1 (1 - exp(-A t)), by the exponential of the whole matrix."""
    generator = seeded(seed)
    matrix, weights = spread(generator, 7, 1e3), normal(generator, 4, 7)
    start = normal(generator, 4, 7)
    system = make_system([(Gram(matrix), weights)], start)
    found = solve_by_flow(system, decompose(matrix), time, 1.0)
    kept = torch.linalg.matrix_exp(-matrix * time)
    moved = (weights - start) @ (torch.eye(7, dtype=F64) - kept)
    torch.testing.assert_close(found.correction, moved, rtol=1e-9, atol=1e-9)
    left = system.residual - found.correction @ matrix
    assert found.residual == pytest.approx(system.relative(float(left.norm())), abs=1e-12)
    off = start + found.correction - weights
    assert found.objective == pytest.approx(0.5 * float((off @ matrix * off).sum()), abs=1e-9)
    assert found.status is Status.FILTERED


@pytest.mark.parametrize(("share", "num_kept"), [(0.65, 13), (0.6501, 14), (0.001, 1), (1.0, 20)])
def test_directions_that_are_left_out_stay(share: float, num_kept: int) -> None:
    generator = seeded(0)
    matrix, weights = spread(generator, 20, 1e2), normal(generator, 3, 20)
    system = make_system([(Gram(matrix), weights)], torch.zeros(3, 20, dtype=F64))
    found = solve_by_flow(system, decompose(matrix), 1e9, share)
    leading = torch.linalg.eigh(matrix).eigenvectors[:, -num_kept:]
    torch.testing.assert_close(
        found.correction, weights @ leading @ leading.mT, rtol=1e-9, atol=1e-9
    )
