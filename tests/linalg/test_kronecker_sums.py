"""Sums of Kronecker products against their dense matrices."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_matrices import normal, seeded
from torch import Tensor

from matsmerge.linalg.conjugate_gradients import conjugate_gradients, solve_kronecker_sum
from matsmerge.linalg.kronecker_sums import (
    decompose_kronecker,
    is_kronecker_sum,
    kroneckers_of,
    nearest_kronecker,
    solve_pair,
    to_unit_trace,
)
from matsmerge.linalg.operators import Gram, Kronecker, Operator, Sum
from matsmerge.linalg.system import Limits, Status, System, make_system

few = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 2**31)
widths = st.integers(1, 6)
F64 = torch.float64


def factor(generator: torch.Generator, d: int, num_rows: int | None = None) -> Tensor:
    """The second moment of a few rows more than it takes to be regular."""
    rows = normal(generator, 2 * d + 2 if num_rows is None else num_rows, d)
    return rows.T @ rows / len(rows)


def full(inputs: Tensor) -> Tensor:
    return torch.diag(inputs) if inputs.ndim == 1 else inputs


def dense(term: Kronecker) -> Tensor:
    matrix: Tensor = torch.kron(term.outputs.double(), full(term.inputs.double()))
    return matrix * term.outputs_scale * term.inputs_scale


def draw_terms(
    generator: torch.Generator,
    shape: tuple[int, int],
    scales: Sequence[float],
    *,
    diagonal: bool = False,
    dtype: torch.dtype = F64,
) -> list[Kronecker]:
    terms = []
    for scale in scales:
        outputs = factor(generator, shape[0]) * scale
        inputs = factor(generator, shape[1])
        inputs = inputs.diagonal().clone() if diagonal else inputs
        terms.append(Kronecker(outputs.to(dtype), inputs.to(dtype)))
    return terms


class Case:
    """The system of some products, and the same on flattened parameters."""

    def __init__(self, generator: torch.Generator, terms: Sequence[Kronecker]) -> None:
        shape = len(terms[0].outputs), len(terms[0].inputs)
        self.terms = list(terms)
        self.start = normal(generator, *shape)
        self.weights = [self.start + normal(generator, *shape) for _ in terms]
        self.matrices = [dense(term) for term in terms]
        self.total = torch.stack(self.matrices).sum(0)
        images = [
            c @ (w - self.start).flatten() for c, w in zip(self.matrices, self.weights, strict=True)
        ]
        self.residual = torch.stack(images).sum(0)

    def system(self) -> System:
        return make_system(zip(self.terms, self.weights, strict=True), self.start)

    def solve(self) -> Tensor:
        """The correction, with the system scaled so that all its unknowns are alike."""
        scale = self.total.diagonal().rsqrt()
        scaled = scale.unsqueeze(-1) * self.total * scale
        solution: Tensor = scale * torch.linalg.solve(scaled, scale * self.residual)
        return solution.view(self.start.shape)

    def objective(self, correction: Tensor) -> float:
        x = (self.start + correction).flatten()
        pairs = zip(self.matrices, self.weights, strict=True)
        return float(sum(0.5 * (x - w.flatten()) @ c @ (x - w.flatten()) for c, w in pairs))

    def relative_residual(self, correction: Tensor) -> float:
        right = self.residual + self.total @ self.start.flatten()
        return float((self.residual - self.total @ correction.flatten()).norm() / right.norm())


def assert_near(found: Tensor, expected: Tensor, digits: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=digits * float(expected.norm()))


# One and two products in closed form


@few
@given(
    seeds,
    widths,
    widths,
    st.lists(st.sampled_from([1.0, 1e3, 1e-6, 1e-12]), min_size=1, max_size=2),
    st.booleans(),
    st.sampled_from([torch.float32, F64]),
)
def test_one_and_two_products_are_the_dense_solve(
    seed: int,
    num_out: int,
    num_in: int,
    scales: list[float],
    diagonal: bool,
    stored: torch.dtype,
) -> None:
    generator = seeded(seed)
    terms = draw_terms(generator, (num_out, num_in), scales, diagonal=diagonal, dtype=stored)
    case = Case(generator, terms)
    solution = solve_pair(case.system(), stored)
    assert solution.status is Status.SOLVED
    condition = float(torch.linalg.cond(case.total))
    assert_near(solution.correction, case.solve(), 1e-12 + 1e-14 * condition)
    # Relative to a norm that is known to float32.
    expected = case.relative_residual(solution.correction)
    assert solution.residual == pytest.approx(expected, rel=1e-5, abs=1e-12)
    assert solution.residual < 1e-10
    before = case.objective(torch.zeros_like(case.start))
    expected = case.objective(solution.correction)
    assert solution.objective == pytest.approx(expected, rel=1e-9, abs=1e-12 * before)


@few
@given(seeds, st.sampled_from([1.0, 1e-6, 1e-12]), st.booleans())
def test_a_model_counts_where_only_it_has_data(seed: int, scale: float, diagonal: bool) -> None:
    """However small its statistics are: two models on inputs that do not meet."""
    generator = seeded(seed)
    mine = torch.tensor([1.0, 1, 1, 0, 0, 0], dtype=F64)
    terms = []
    for size, mask in ((1.0, mine), (scale, 1 - mine)):
        outputs = factor(generator, 3) + torch.eye(3, dtype=F64)
        inputs = factor(generator, 6) + torch.eye(6, dtype=F64)
        inputs = inputs.diagonal() * mask if diagonal else inputs * torch.outer(mask, mask)
        terms.append(Kronecker(outputs * size, inputs))
    case = Case(generator, terms)
    solution = solve_pair(case.system(), F64)
    assert solution.status is Status.SOLVED
    x = case.start + solution.correction
    expected = torch.where(mine == 1, case.weights[0], case.weights[1])
    # Float64 has few digits left of what is 1e-12 as large as what it was turned together with.
    digits = 1e-9 + 1e-14 / scale
    torch.testing.assert_close(x, expected, rtol=digits, atol=digits)


@few
@given(seeds, st.integers(1, 2), st.integers(0, 3), st.integers(0, 3))
def test_singular_pairs_are_solved_where_there_is_data(
    seed: int, num_models: int, missing_out: int, missing_in: int
) -> None:
    """A direction that neither model has, for outputs or for inputs, stays at the start."""
    generator = seeded(seed)
    num_out, num_in = 3 + missing_out, 4 + missing_in
    turn_o = torch.linalg.qr(normal(generator, num_out, num_out)).Q
    turn_g = torch.linalg.qr(normal(generator, num_in, num_in)).Q
    q_o, q_g = turn_o[:, :3], turn_g[:, :4]
    terms = [
        Kronecker(q_o @ factor(generator, 3) @ q_o.T, q_g @ factor(generator, 4) @ q_g.T)
        for _ in range(num_models)
    ]
    case = Case(generator, terms)
    rounded = [Kronecker(t.outputs.float(), t.inputs.float()) for t in terms]
    for stored, products, digits in ((F64, terms, 1e-9), (torch.float32, rounded, 1e-2)):
        system = make_system(zip(products, case.weights, strict=True), case.start)
        solution = solve_pair(system, stored)
        is_regular = missing_out == missing_in == 0
        assert solution.status is (Status.SOLVED if is_regular else Status.SINGULAR)
        size = float(solution.correction.norm())
        assert float((turn_o[:, 3:].T @ solution.correction).norm()) <= digits * size
        assert float((solution.correction @ turn_g[:, 4:]).norm()) <= digits * size
        assert solution.residual < 1e-5
        # And in the directions there are, it is the solution of the small regular system.
        inner = Case(
            seeded(0), [Kronecker(q_o.T @ t.outputs @ q_o, q_g.T @ t.inputs @ q_g) for t in terms]
        )
        right = q_o.T @ case.residual.view(num_out, num_in) @ q_g
        small = torch.linalg.solve(inner.total, right.flatten()).view(3, 4)
        assert_near(q_o.T @ solution.correction @ q_g, small, digits)


def test_rare_inputs_count_whatever_the_precision_of_their_counts() -> None:
    """The input factor of an embedding is exact entry by entry: no entry hides another."""
    generator = seeded(0)
    counts = torch.tensor([1.0, 1e-4, 1e-8, 1e-12], dtype=F64)
    terms = [Kronecker(factor(generator, 3), counts) for _ in range(2)]
    case = Case(generator, terms)
    solution = solve_pair(case.system(), torch.float32)
    assert solution.status is Status.SOLVED
    torch.testing.assert_close(solution.correction, case.solve())


# The nearest product


@few
@given(
    seeds,
    widths,
    widths,
    st.lists(st.floats(1e-12, 1e3), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([torch.float32, F64]),
)
def test_the_nearest_product_is_the_first_singular_pair(
    seed: int,
    num_out: int,
    num_in: int,
    scales: list[float],
    diagonal: bool,
    dtype: torch.dtype,
) -> None:
    """Of the matrix rearranged so that products are outer products: Van Loan & Pitsianis."""
    generator = seeded(seed)
    terms = draw_terms(generator, (num_out, num_in), scales, diagonal=diagonal, dtype=dtype)
    total = torch.stack([dense(term) for term in terms]).sum(0)
    blocks = total.view(num_out, num_in, num_out, num_in).permute(0, 2, 1, 3)
    u, s, v = torch.linalg.svd(blocks.reshape(num_out**2, num_in**2), full_matrices=False)
    best = s[0] * torch.kron(u[:, 0].view(num_out, num_out), v[0].view(num_in, num_in))
    found = nearest_kronecker(terms)
    assert_near(dense(found), best, 1e-6)
    # Its factors are positive, so it can precondition.
    for part in (found.outputs, full(found.inputs)):
        assert float(torch.linalg.eigvalsh(part).min()) > 0


def test_a_product_is_nearest_to_itself_and_nothing_to_nothing() -> None:
    generator = seeded(0)
    (term,) = draw_terms(generator, (3, 4), [1e-9])
    assert_near(dense(nearest_kronecker([term])), dense(term), 1e-12)
    assert_near(dense(nearest_kronecker([term, term * 2.0])), 3 * dense(term), 1e-12)
    nothing = term * 0.0
    assert not dense(nearest_kronecker([nothing, nothing])).any()
    assert_near(dense(nearest_kronecker([nothing, term])), dense(term), 1e-12)


@few
@given(seeds, widths, widths, st.booleans())
def test_eigenbasis_of_a_product(seed: int, num_out: int, num_in: int, diagonal: bool) -> None:
    generator = seeded(seed)
    (term,) = draw_terms(generator, (num_out, num_in), [0.5], diagonal=diagonal)
    basis = decompose_kronecker(term)
    x = normal(generator, num_out, num_in)
    assert_near(basis.leave(basis.enter(x)), x, 1e-12)
    assert float(basis.enter(x).norm()) == pytest.approx(float(x.norm()))
    assert_near(basis.leave(basis.values * basis.enter(x)), term(x), 1e-12)
    # Another product in this basis, in float32.
    (other,) = draw_terms(generator, (num_out, num_in), [1e-20], diagonal=diagonal)
    turned = basis.rotate(other, 1e20, torch.float32, F64)
    assert turned.outputs.dtype == turned.inputs.dtype == torch.float32
    assert_near(basis.leave(turned(basis.enter(x))), other(x) * 1e20, 1e-5)


@few
@given(seeds, widths, widths, st.booleans())
def test_unit_traces(seed: int, num_out: int, num_in: int, diagonal: bool) -> None:
    generator = seeded(seed)
    terms = draw_terms(generator, (num_out, num_in), [1e-12, 2.0], diagonal=diagonal)
    units, scales = to_unit_trace(terms)
    assert scales == pytest.approx([float(dense(t).trace()) for t in terms])
    assert [term.trace for term in terms] == pytest.approx(scales)
    for unit, scale, term in zip(units, scales, terms, strict=True):
        assert float(unit.outputs.trace()) == pytest.approx(1)
        assert float(full(unit.inputs).trace()) == pytest.approx(1)
        assert_near(dense(unit) * scale, dense(term), 1e-12)


# Many products


def dense_preconditioned(case: Case, damping: float, iterations: int) -> list[Tensor]:
    """Textbook preconditioned conjugate gradients on dense float64 matrices.

    The preconditioner is the damped nearest product, from a singular value decomposition.
    """
    num_out, num_in = case.start.shape
    blocks = case.total.view(num_out, num_in, num_out, num_in).permute(0, 2, 1, 3)
    u, s, v = torch.linalg.svd(blocks.reshape(num_out**2, num_in**2), full_matrices=False)
    nearest = s[0] * torch.kron(u[:, 0].view(num_out, num_out), v[0].view(num_in, num_in))
    mean = nearest.trace() / len(nearest)
    inverse = torch.linalg.inv(nearest + damping * mean * torch.eye(len(nearest), dtype=F64))
    d, r = torch.zeros_like(case.residual), case.residual
    z = inverse @ r
    p, rz = z, r @ z
    iterates = [d]
    for _ in range(iterations):
        q = case.total @ p
        alpha = rz / (p @ q)
        d, r = d + alpha * p, r - alpha * q
        z = inverse @ r
        previous, rz = rz, r @ z
        p = z + rz / previous * p
        iterates.append(d)
    return [d.view(num_out, num_in) for d in iterates]


@few
@given(
    seeds,
    st.integers(2, 6),
    st.integers(2, 6),
    st.lists(st.floats(0.1, 10), min_size=2, max_size=5),
    st.booleans(),
    st.sampled_from([torch.float32, F64]),
    st.sampled_from([1.0, 1e-10]),
    st.sampled_from([0.01, 1.0]),
)
def test_iterates_are_those_of_dense_float64(
    seed: int,
    num_out: int,
    num_in: int,
    scales: list[float],
    diagonal: bool,
    dtype: torch.dtype,
    scale: float,
    damping: float,
) -> None:
    generator = seeded(seed)
    terms = draw_terms(
        generator,
        (num_out, num_in),
        [weight * scale for weight in scales],
        diagonal=diagonal,
        dtype=dtype,
    )
    case = Case(generator, terms)
    iterations = 8
    limits = Limits(iterations, keep=range(iterations + 1))
    solution = solve_kronecker_sum(case.system(), limits, damping=damping)
    expected = dense_preconditioned(case, damping, iterations)
    for at in range(1, solution.iterations + 1):
        assert_near(solution.kept[at], expected[at], 1e-4)
    before = case.objective(torch.zeros_like(case.start))
    for at, value in enumerate(solution.trace.objectives):
        assert value == pytest.approx(case.objective(expected[at]), rel=1e-4, abs=1e-6 * before)
    for at, value in enumerate(solution.trace.residuals):
        assert value == pytest.approx(case.relative_residual(expected[at]), rel=1e-3, abs=1e-5)
    assert_near(solution.correction, expected[solution.iterations], 1e-4)


@few
@given(seeds, st.integers(2, 4), st.integers(0, 1))
def test_many_products_converge_to_the_dense_solve(
    seed: int, num_models: int, diagonal: int
) -> None:
    generator = seeded(seed)
    terms = draw_terms(generator, (5, 6), [1.0] * num_models, diagonal=bool(diagonal))
    case = Case(generator, terms)
    solution = solve_kronecker_sum(case.system(), Limits(200))
    condition = float(torch.linalg.cond(case.total))
    assert_near(solution.correction, case.solve(), 1e-6 * condition)
    plain = conjugate_gradients(case.system(), Limits(200, tolerance=1e-8))
    assert_near(plain.correction, case.solve(), 1e-7 * condition)
    if num_models == 2:
        pair = solve_pair(case.system(), F64)
        assert_near(plain.correction, pair.correction, 1e-7 * condition)


def test_groups_are_solved_as_blocks() -> None:
    generator = seeded(0)
    num_groups, shape = 3, (2, 4)
    groups = [draw_terms(generator, shape, [1.0] * 3) for _ in range(num_groups)]
    cases = [Case(generator, terms) for terms in groups]
    operators = [
        Kronecker(
            torch.stack([groups[g][m].outputs for g in range(num_groups)]),
            torch.stack([groups[g][m].inputs for g in range(num_groups)]),
        )
        for m in range(3)
    ]
    weights = [torch.stack([case.weights[m] for case in cases]) for m in range(3)]
    start = torch.stack([case.start for case in cases])
    expected = torch.stack([case.solve() for case in cases])
    system = make_system(zip(operators, weights, strict=True), start)
    assert_near(solve_kronecker_sum(system, Limits(200)).correction, expected, 1e-4)
    assert_near(conjugate_gradients(system, Limits(200)).correction, expected, 1e-6)
    pair = make_system(zip(operators[:2], weights[:2], strict=True), start)
    for g in range(num_groups):
        alone = make_system(zip(groups[g][:2], cases[g].weights[:2], strict=True), start[g])
        assert_near(solve_pair(pair).correction[g], solve_pair(alone).correction, 1e-9)


def test_the_preconditioner_saves_iterations() -> None:
    generator = seeded(0)
    terms = []
    scale = torch.arange(1, 21, dtype=F64) ** -1.5
    for _ in range(4):
        outputs, inputs = factor(generator, 20), factor(generator, 20)
        spread = torch.outer(scale, scale)
        terms.append(Kronecker(outputs * spread, inputs * spread))
    system = Case(generator, terms).system()
    plain = conjugate_gradients(system, Limits(200))
    assert solve_kronecker_sum(system, Limits(20)).objective < plain.objective


# Which operators


def test_which_operators_are_sums_of_products() -> None:
    a, b = draw_terms(seeded(0), (2, 3), [1.0, 2.0])
    assert is_kronecker_sum(a)
    assert is_kronecker_sum(a + b)
    assert kroneckers_of(a) == [a]
    assert list(kroneckers_of(a + b)) == [a, b]
    others: list[Operator] = [Gram(torch.eye(3)), Sum((a, Gram(torch.eye(3))))]
    for other in others:
        assert not is_kronecker_sum(other)
        with pytest.raises(AssertionError, match="not a sum"):
            kroneckers_of(other)
