"""Closed forms against dense float64 solves of the flattened system."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_matrices import normal, seeded
from torch import Tensor

from matsmerge.linalg.closed_form import solve_diagonal, solve_gram, solve_gram_in_float32
from matsmerge.linalg.eigenbasis import decompose, dense, solve_by_filter
from matsmerge.linalg.operators import (
    Diagonal,
    Gram,
    Identity,
    Kronecker,
    LowRank,
    Operator,
)
from matsmerge.linalg.system import Solution, Status, System, make_system

few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)
widths = st.integers(1, 6)
task_weights = st.lists(st.floats(1e-3, 10), min_size=1, max_size=4)
F64 = torch.float64

GramSolver = Callable[..., Solution]


def by_filter(
    system: System, *, ridge: float = 0.0, stored: torch.dtype = torch.float32
) -> Solution:
    return solve_by_filter(system, decompose(dense(system.operator), stored), ridge)


GRAM_SOLVERS: list[GramSolver] = [solve_gram, by_filter]
each_gram_solver = pytest.mark.parametrize("solve", GRAM_SOLVERS, ids=["cholesky", "filter"])


def regular_factor(generator: torch.Generator, *shape: int) -> Tensor:
    """(..., d, d) with eigenvalues from 1 to about 10."""
    *batch, d = shape
    rows = normal(generator, *batch, 2 * d, d)
    return rows.mT @ rows / d + torch.eye(d, dtype=F64)


def as_blocks(matrix: Tensor, num_out: int) -> Tensor:
    """X G on X flattened row by row: a block for every row, of every group."""
    eye = torch.eye(num_out, dtype=F64)
    groups = matrix.double().reshape(-1, *matrix.shape[-2:])
    blocks: Tensor = torch.block_diag(*(torch.kron(eye, g) for g in groups))
    return blocks


class DenseSystem:
    """The same system on flattened parameters, written as the objective says it."""

    def __init__(
        self, matrices: Sequence[Tensor], weights: Sequence[Tensor], start: Tensor
    ) -> None:
        self.matrices = list(matrices)
        self.weights = [w.double().flatten() for w in weights]
        self.start = start.double()
        self.total = sum(self.matrices[1:], self.matrices[0])
        images = [c @ w for c, w in zip(self.matrices, self.weights, strict=True)]
        self.right = sum(images[1:], images[0])

    def solve(self, ridge: float = 0.0) -> Tensor:
        """The correction: a ridge holds on to the start."""
        start = self.start.flatten()
        regular = self.total + ridge * torch.eye(len(start), dtype=F64)
        correction: Tensor = torch.linalg.solve(regular, self.right - self.total @ start)
        return correction.view(self.start.shape)

    def objective(self, correction: Tensor) -> float:
        x = (self.start + correction).flatten()
        terms = zip(self.matrices, self.weights, strict=True)
        return float(sum(0.5 * (x - w) @ c @ (x - w) for c, w in terms))

    def residual(self, correction: Tensor) -> float:
        x = (self.start + correction).flatten()
        return float((self.right - self.total @ x).norm() / self.right.norm())

    def assert_reported(self, solution: Solution) -> None:
        """Residual and objective are what the solution says they are."""
        zero = torch.zeros_like(self.start)
        # The size that residuals are relative to is known to float32 only.
        assert solution.residual == pytest.approx(
            self.residual(solution.correction), rel=1e-5, abs=1e-12
        )
        assert solution.objective == pytest.approx(
            self.objective(solution.correction), rel=1e-9, abs=1e-12 * self.objective(zero)
        )


@few
@given(seeds, widths, widths, task_weights)
def test_a_system_is_that_of_its_objective(
    seed: int, num_out: int, num_in: int, weighting: list[float]
) -> None:
    generator = seeded(seed)
    start = normal(generator, num_out, num_in)
    weights = [normal(generator, num_out, num_in) for _ in weighting]
    factors = [
        (regular_factor(generator, num_out), regular_factor(generator, num_in)) for _ in weights
    ]
    operators = [Kronecker(o, g) * c for (o, g), c in zip(factors, weighting, strict=True)]
    system = make_system(zip(operators, weights, strict=True), start)
    matrices = [torch.kron(o, g) * c for (o, g), c in zip(factors, weighting, strict=True)]
    expected = DenseSystem(matrices, weights, start)
    zero = torch.zeros_like(start)
    assert system.objective == pytest.approx(expected.objective(zero), rel=1e-12)
    assert system.size == pytest.approx(float(expected.right.norm()), rel=1e-5)
    x = start.clone().requires_grad_()
    flat = x.flatten()
    terms = zip(matrices, expected.weights, strict=True)
    objective = torch.stack([0.5 * (flat - w) @ c @ (flat - w) for c, w in terms]).sum()
    (slope,) = torch.autograd.grad(objective, x)
    torch.testing.assert_close(
        system.residual, -slope, rtol=1e-10, atol=1e-10 * float(slope.norm())
    )
    # The objective elsewhere follows from the correction and what it leaves.
    d = normal(generator, num_out, num_in)
    left = system.residual - system.operator(d)
    assert system.objective_at(d, left) == pytest.approx(expected.objective(d), rel=1e-9)
    assert system.relative(float(left.norm())) == pytest.approx(expected.residual(d), rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e-18, 1e-24])
def test_residuals_are_relative_however_small_the_statistics(scale: float) -> None:
    generator = seeded(0)
    weights = [0.03 * normal(generator, 4, 5) for _ in range(2)]
    factors = [
        (regular_factor(generator, 4) * scale, regular_factor(generator, 5)) for _ in weights
    ]
    terms = [(Kronecker(o, g), w) for (o, g), w in zip(factors, weights, strict=True)]
    system = make_system(terms, torch.zeros(4, 5, dtype=F64))
    assert system.relative(float(system.residual.norm())) == pytest.approx(1, rel=1e-3)


def test_equal_models_leave_nothing_to_solve() -> None:
    generator = seeded(0)
    weights = normal(generator, 4, 5)
    grams = [Gram(regular_factor(generator, 5)) for _ in range(3)]
    system = make_system([(gram, weights) for gram in grams], weights)
    assert not system.residual.any()
    assert system.objective == 0
    assert not solve_gram(system).correction.any()


# Diagonal


@few
@given(seeds, widths, widths, task_weights, st.booleans(), st.sampled_from([torch.float32, F64]))
def test_diagonal_is_the_dense_solve(
    seed: int, num_out: int, num_in: int, weighting: list[float], shared: bool, dtype: torch.dtype
) -> None:
    generator = seeded(seed)
    start = normal(generator, num_out, num_in)
    weights = [normal(generator, num_out, num_in) for _ in weighting]
    shape = (1, num_in) if shared else (num_out, num_in)
    values = [(normal(generator, *shape).square() * c).to(dtype) for c in weighting]
    system = make_system(zip(map(Diagonal, values), weights, strict=True), start)
    matrices = [torch.diag(v.double().expand(num_out, num_in).flatten()) for v in values]
    expected = DenseSystem(matrices, weights, start)
    solution = solve_diagonal(system)
    assert solution.status is Status.SOLVED
    # Values that are float32 are added up in float32.
    digits = 1e-10 if dtype == F64 else 1e-5
    torch.testing.assert_close(solution.correction, expected.solve(), rtol=digits, atol=digits)
    if dtype == F64:
        expected.assert_reported(solution)


def test_identity_is_the_average() -> None:
    generator = seeded(0)
    weights = [normal(generator, 3, 4) for _ in range(3)]
    start = normal(generator, 3, 4)
    terms = [(Identity(c), w) for c, w in zip((1.0, 2.0, 5.0), weights, strict=True)]
    solution = solve_diagonal(make_system(terms, start))
    expected = (weights[0] + 2 * weights[1] + 5 * weights[2]) / 8
    torch.testing.assert_close(start + solution.correction, expected)
    assert solution.status is Status.SOLVED


@few
@given(seeds, widths, st.integers(2, 6))
def test_what_no_diagonal_has_stays_at_the_start(seed: int, num_out: int, num_in: int) -> None:
    generator = seeded(seed)
    start = normal(generator, num_out, num_in)
    weights = [normal(generator, num_out, num_in) for _ in range(2)]
    unseen = torch.zeros(num_out, num_in, dtype=torch.bool)
    unseen[:, 0] = True
    values = [normal(generator, num_out, num_in).square().masked_fill(unseen, 0) for _ in weights]
    solution = solve_diagonal(make_system(zip(map(Diagonal, values), weights, strict=True), start))
    assert solution.status is Status.SINGULAR
    assert not solution.correction[unseen].any()
    mean = (values[0] * weights[0] + values[1] * weights[1]) / (values[0] + values[1])
    expected = torch.where(unseen, start, mean)
    torch.testing.assert_close(start + solution.correction, expected)
    assert solution.residual < 1e-14


# Gram


@few
@given(
    seeds,
    st.integers(0, 3),
    widths,
    widths,
    task_weights,
    st.sampled_from([0.0, 1e-3, 1.0]),
    st.sampled_from([torch.float32, F64]),
)
@each_gram_solver
def test_gram_is_the_dense_solve(
    solve: GramSolver,
    seed: int,
    num_groups: int,
    num_out: int,
    num_in: int,
    weighting: list[float],
    ridge: float,
    stored: torch.dtype,
) -> None:
    generator = seeded(seed)
    batch = (num_groups,) if num_groups else ()
    start = normal(generator, *batch, num_out, num_in)
    weights = [normal(generator, *batch, num_out, num_in) for _ in weighting]
    grams = [(regular_factor(generator, *batch, num_in) * c).to(stored).double() for c in weighting]
    system = make_system(zip(map(Gram, grams), weights, strict=True), start)
    expected = DenseSystem([as_blocks(g, num_out) for g in grams], weights, start)
    solution = solve(system, ridge=ridge, stored=stored)
    assert solution.status is Status.SOLVED
    torch.testing.assert_close(solution.correction, expected.solve(ridge), rtol=1e-9, atol=1e-10)
    expected.assert_reported(solution)


@few
@given(seeds, widths, widths, st.integers(1, 4))
@each_gram_solver
def test_low_ranks_add_up_to_a_gram(
    solve: GramSolver, seed: int, num_out: int, num_in: int, num_models: int
) -> None:
    generator = seeded(seed)
    start = normal(generator, num_out, num_in)
    weights = [normal(generator, num_out, num_in) for _ in range(num_models)]
    rows = [normal(generator, 2 * num_in + 3, num_in) for _ in weights]
    terms: list[tuple[Operator, Tensor]] = [
        (LowRank(z, 1 / len(z)), w) for z, w in zip(rows, weights, strict=True)
    ]
    terms.append((Gram(torch.eye(num_in, dtype=F64)), start))  # and with one given whole
    system = make_system(terms, start)
    grams = [*(z.T @ z / len(z) for z in rows), torch.eye(num_in, dtype=F64)]
    expected = DenseSystem([as_blocks(g, num_out) for g in grams], [*weights, start], start)
    solution = solve(system, stored=F64)
    assert solution.status is Status.SOLVED
    torch.testing.assert_close(solution.correction, expected.solve(), rtol=1e-9, atol=1e-10)
    expected.assert_reported(solution)


def singular_case(
    seed: int, num_out: int, num_in: int, num_rows: Sequence[int], stored: torch.dtype
) -> tuple[System, Tensor, Tensor, Tensor]:
    """A system of too few rows, the correction nearest to the start, its range and null space.

    Both come from the rows themselves, before they are squared and rounded.
    """
    generator = seeded(seed)
    start = normal(generator, num_out, num_in)
    weights = [start + normal(generator, num_out, num_in) for _ in num_rows]
    rows = [normal(generator, n, num_in) for n in num_rows]
    grams = [(z.T @ z / len(z)).to(stored).double() for z in rows]
    system = make_system(zip(map(Gram, grams), weights, strict=True), start)
    stacked = torch.cat([z / len(z) ** 0.5 for z in rows])
    wanted = [(w - start) @ z.T / len(z) ** 0.5 for w, z in zip(weights, rows, strict=True)]
    # The least squares problem that the Grams are the normal equations of.
    nearest = (torch.linalg.pinv(stacked) @ torch.cat(wanted, -1).T).T
    null_space = torch.linalg.svd(stacked, full_matrices=True).Vh[len(stacked) :].T
    return system, nearest, stacked, null_space


@few
@given(seeds, widths, st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 10))
@each_gram_solver
def test_directions_without_data_stay_at_the_start(
    solve: GramSolver, seed: int, num_out: int, num_rows: list[int], num_missing: int
) -> None:
    num_in = sum(num_rows) + num_missing
    system, nearest, stacked, null_space = singular_case(seed, num_out, num_in, num_rows, F64)
    condition = float(torch.linalg.cond(stacked)) ** 2
    solution = solve(system, stored=F64)
    assert solution.status is Status.SINGULAR
    assert solution.residual < 1e-12
    size = float(nearest.norm())
    assert float((solution.correction - nearest).norm()) < 1e-13 * condition * size
    assert float((solution.correction @ null_space).norm()) < 1e-13 * condition * size


@few
@given(seeds, st.lists(st.integers(5, 30), min_size=1, max_size=3), st.integers(1, 100))
@each_gram_solver
def test_rounded_singular_grams_do_not_blow_up(
    solve: GramSolver, seed: int, num_rows: list[int], num_missing: int
) -> None:
    num_in = sum(num_rows) + num_missing
    system, nearest, stacked, null_space = singular_case(seed, 4, num_in, num_rows, torch.float32)
    solution = solve(system)
    condition = float(torch.linalg.cond(stacked)) ** 2
    size = float(nearest.norm())
    assert solution.status is Status.SINGULAR
    assert solution.residual < 1e-3
    # What the data has but rounding hides may be missing; nothing may be added.
    assert float(solution.correction.norm()) < (1 + 1e-5 * condition) * size
    assert float((solution.correction @ null_space).norm()) < 1e-5 * condition * size
    if condition < 1e4:
        assert float((solution.correction - nearest).norm()) < 1e-6 * condition * size


@pytest.mark.parametrize("ridge", [1e-12, 1e-9, 1e-7, 1e-5, 1e-3])
@each_gram_solver
def test_a_small_ridge_does_not_amplify_rounding(solve: GramSolver, ridge: float) -> None:
    system, nearest, _, null_space = singular_case(0, 4, 60, [10, 10, 10], torch.float32)
    solution = solve(system, ridge=ridge)
    size = float(nearest.norm())
    assert float(solution.correction.norm()) < 1.01 * size
    # A ridge just above rounding still lets through what is smaller than it.
    assert float((solution.correction @ null_space).norm()) < 0.1 * size


@pytest.mark.parametrize("ratio", [1e-4, 1e-8, 1e-12])
@each_gram_solver
def test_groups_are_solved_each_in_its_own_scale(solve: GramSolver, ratio: float) -> None:
    """A channel of small activations is no less known than one of large."""
    generator = seeded(0)
    scales = torch.tensor([1.0, ratio], dtype=F64).view(2, 1, 1)
    grams = [regular_factor(generator, 2, 5) * scales for _ in range(3)]
    weights = [normal(generator, 2, 3, 5) for _ in grams]
    start = normal(generator, 2, 3, 5)
    together = solve(make_system(zip(map(Gram, grams), weights, strict=True), start))
    assert together.status is Status.SOLVED
    for group in range(2):
        terms = [(Gram(g[group]), w[group]) for g, w in zip(grams, weights, strict=True)]
        alone = solve(make_system(terms, start[group]))
        torch.testing.assert_close(together.correction[group], alone.correction)


def test_ill_conditioned_grams_are_solved_in_float64() -> None:
    """What float64 statistics say is used down to float64's own rounding."""
    generator = seeded(0)
    d = 30
    q = torch.linalg.qr(normal(generator, d, d)).Q
    values = torch.logspace(0, -9, d, dtype=F64)
    gram = (q * values) @ q.T
    gram = (gram + gram.T) / 2
    weights = [normal(generator, 4, d) for _ in range(2)]
    start = torch.zeros(4, d, dtype=F64)
    system = make_system([(Gram(gram), w) for w in weights], start)
    mean = (weights[0] + weights[1]) / 2
    for solve in GRAM_SOLVERS:
        fine = solve(system, stored=F64)
        assert fine.status is Status.SOLVED
        torch.testing.assert_close(fine.correction, mean, rtol=0, atol=1e-5)
        # The same numbers as float32 statistics say nothing of the lowest directions.
        coarse = solve(system, stored=torch.float32)
        assert coarse.status is Status.SINGULAR
        lowest = q[:, values < 1e-7]
        assert float((coarse.correction @ lowest).norm()) < 1e-6
        highest = q[:, values > 1e-5]
        torch.testing.assert_close(coarse.correction @ highest, mean @ highest, rtol=0, atol=1e-8)


@few
@given(seeds, widths, widths, task_weights)
def test_inverse_in_float32_is_the_solution_to_float32(
    seed: int, num_out: int, num_in: int, weighting: list[float]
) -> None:
    generator = seeded(seed)
    start = normal(generator, num_out, num_in)
    weights = [normal(generator, num_out, num_in) for _ in weighting]
    grams = [c * regular_factor(generator, num_in) for c in weighting]
    system = make_system(zip(map(Gram, grams), weights, strict=True), start)
    solution = solve_gram_in_float32(system, start)
    expected = DenseSystem([as_blocks(g, num_out) for g in grams], weights, start)
    exact = expected.solve() + start
    total = sum(grams[1:], grams[0])
    right = sum((w @ g for w, g in zip(weights, grams, strict=True)), torch.zeros(()))
    bound = 100 * float(torch.linalg.cond(total)) * torch.finfo(torch.float32).eps
    size = float(right.norm() * torch.linalg.inv(total).norm())
    assert float((solution.correction + start - exact).norm()) <= bound * size
    assert solution.status is Status.SOLVED
    expected.assert_reported(solution)


def test_inverse_in_float32_starts_from_nothing() -> None:
    """Equal models, which other solvers leave as they are, come out rounded."""
    gram, weights = torch.eye(3, dtype=F64), torch.full((2, 3), 1 / 3, dtype=F64)
    system = make_system([(Gram(gram), weights), (Gram(gram), weights)], weights)
    merged = weights + solve_gram_in_float32(system, weights).correction
    assert torch.equal(merged, weights.float().double())
    assert not torch.equal(merged, weights)


def test_what_float32_cannot_tell_from_singular_stays_at_the_init() -> None:
    gram = torch.tensor([[1, 1], [1, 1 + 1e-9]], dtype=F64)
    start, weights = torch.zeros(1, 2, dtype=F64), torch.ones(1, 2, dtype=F64)
    system = make_system([(Gram(gram), weights)], start)
    solution = solve_gram_in_float32(system, start)
    assert solution.status is Status.SINGULAR
    assert not solution.correction.any()
    exact = solve_gram(system, stored=F64)
    torch.testing.assert_close(exact.correction, weights, rtol=1e-5, atol=0)
