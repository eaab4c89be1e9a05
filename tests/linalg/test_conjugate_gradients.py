"""Conjugate gradients against dense float64 solves, and what they do when rounding takes over."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_matrices import normal, seeded, spread
from torch import Tensor

from matsmerge.linalg.closed_form import solve_diagonal, solve_gram
from matsmerge.linalg.conjugate_gradients import (
    conjugate_gradients,
    jacobi,
    solve_kronecker_sum,
)
from matsmerge.linalg.eigenbasis import decompose, dense, follow_trajectory
from matsmerge.linalg.kronecker_sums import solve_pair
from matsmerge.linalg.operators import (
    Diagonal,
    Gram,
    Identity,
    Kronecker,
    LowRank,
    Operator,
)
from matsmerge.linalg.rounding import without_rounding
from matsmerge.linalg.system import Limits, Solution, Status, System, make_system

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 2**31)
F64 = torch.float64


class Case:
    """Operators with their dense matrices on flattened parameters, weights and a start."""

    def __init__(
        self, terms: Sequence[tuple[Operator, Tensor]], shape: tuple[int, int], seed: int = 0
    ) -> None:
        generator = seeded(seed)
        self.operators = [operator for operator, _ in terms]
        self.matrices = [matrix for _, matrix in terms]
        self.start = normal(generator, *shape)
        self.weights = [self.start + normal(generator, *shape) for _ in terms]
        self.total = sum(self.matrices[1:], self.matrices[0])

    def system(self, start: Tensor | None = None) -> System:
        start = self.start if start is None else start
        return make_system(zip(self.operators, self.weights, strict=True), start)

    def right(self) -> Tensor:
        pairs = zip(self.matrices, self.weights, strict=True)
        return torch.stack([c @ w.flatten() for c, w in pairs]).sum(0)

    def solve(self) -> Tensor:
        solution: Tensor = torch.linalg.solve(self.total, self.right())
        return solution.view(self.start.shape)

    def objective(self, x: Tensor) -> float:
        pairs = zip(self.matrices, self.weights, strict=True)
        return float(sum(0.5 * (x - w).flatten() @ c @ (x - w).flatten() for c, w in pairs))

    def residual(self, x: Tensor) -> float:
        right = self.right()
        return float((right - self.total @ x.flatten()).norm() / right.norm())


def kroneckers(
    seed: int,
    shape: tuple[int, int],
    num_models: int,
    condition: float,
    dtype: torch.dtype = F64,
    scale: float = 1.0,
) -> Case:
    """K-FAC of several models, each factor with this condition and stored in this precision."""
    generator = seeded(seed)
    terms: list[tuple[Operator, Tensor]] = []
    for _ in range(num_models):
        outputs = (spread(generator, shape[0], condition) * scale).to(dtype)
        inputs = spread(generator, shape[1], condition).to(dtype)
        matrix = torch.kron(outputs.double(), inputs.double())
        terms.append((Kronecker(outputs, inputs), matrix))
    return Case(terms, shape, seed)


def mixture(seed: int, shape: tuple[int, int], kinds: Sequence[str]) -> Case:
    """A well-posed sum of operators of any kinds."""
    generator = seeded(seed)
    num_out, num_in = shape
    eye = torch.eye(num_out, dtype=F64)
    terms: list[tuple[Operator, Tensor]] = []
    for kind in kinds:
        outputs, inputs = spread(generator, num_out, 5), spread(generator, num_in, 5)
        match kind:
            case "diagonal":
                values = normal(generator, num_out, num_in).square() + 0.1
                terms.append((Diagonal(values), torch.diag(values.flatten())))
            case "gram":
                terms.append((Gram(inputs), torch.kron(eye, inputs)))
            case "low rank":
                rows = normal(generator, 3, num_in)
                terms.append((LowRank(rows, 0.2), torch.kron(eye, 0.2 * rows.T @ rows)))
            case "kronecker":
                terms.append((Kronecker(outputs, inputs), torch.kron(outputs, inputs)))
    terms.append((Identity(0.3), 0.3 * torch.eye(num_out * num_in, dtype=F64)))
    return Case(terms, shape, seed)


mixtures = st.builds(
    mixture,
    seeds,
    st.tuples(st.integers(1, 5), st.integers(1, 6)),
    st.lists(
        st.sampled_from(["diagonal", "gram", "low rank", "kronecker"]), min_size=1, max_size=3
    ),
)


# Well-posed systems


@settings(max_examples=8, deadline=None)
@given(mixtures, seeds, st.booleans())
def test_any_start_leads_to_the_solution(case: Case, seed: int, scaled: bool) -> None:
    expected = case.solve()
    far = 10 * normal(seeded(seed), *case.start.shape)
    for start in (case.start, far, expected + 1e-3 * far, torch.zeros_like(far)):
        system = case.system(start)
        precondition = jacobi(system.operator) if scaled else torch.clone
        solution = conjugate_gradients(system, Limits(200), precondition=precondition)
        x = start + solution.correction
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-7 * float(expected.norm()))
        assert solution.residual < 1e-7


def test_going_on_after_the_solution_does_not_leave_it() -> None:
    """A residual computed anew is larger than one that has fallen below rounding."""
    for seed in (10, 27, 33, 37):
        case = mixture(seed, (3, 6), ["kronecker", "kronecker", "low rank"])
        system = case.system(10 * normal(seeded(seed), 3, 6))
        for precondition in (torch.clone, jacobi(system.operator)):
            solution = conjugate_gradients(system, Limits(400), precondition=precondition)
            assert solution.residual < 1e-12


@few
@given(mixtures, st.integers(0, 60), st.sampled_from([torch.float32, F64]))
def test_residual_and_objective_are_the_dense_ones(
    case: Case, iterations: int, products: torch.dtype
) -> None:
    """Whatever the products are computed in: both are computed anew in float64 at the end."""
    solution = conjugate_gradients(case.system(), Limits(iterations), products=products)
    x = case.start + solution.correction
    assert solution.objective == pytest.approx(
        case.objective(x), rel=1e-9, abs=1e-12 * case.objective(case.start)
    )
    # Relative to a norm that is known to float32.
    assert solution.residual == pytest.approx(case.residual(x), rel=1e-5, abs=1e-13)


@few
@given(mixtures)
def test_the_objective_falls(case: Case) -> None:
    solution = conjugate_gradients(case.system(), Limits(50, keep=range(51)))
    before = case.objective(case.start)
    objectives = [case.objective(case.start + solution.kept[at]) for at in range(51)]
    assert (np.diff(objectives) < 1e-13 * before).all()
    done = len(solution.trace.objectives)
    np.testing.assert_allclose(
        solution.trace.objectives, objectives[:done], rtol=0, atol=1e-12 * before
    )


@few
@given(seeds, st.integers(1, 12))
def test_iterates_are_the_best_in_the_span_of_the_powers(seed: int, iterations: int) -> None:
    """Each iterate minimises the objective over R, A R, A² R, ...; conditions below 100."""
    case = kroneckers(seed, (4, 5), 2, 10)
    system = case.system()
    solution = conjugate_gradients(system, Limits(iterations, keep=range(1, iterations + 1)))
    first = system.residual.flatten()
    basis = (first / first.norm()).unsqueeze(-1)
    for at in range(1, iterations + 1):
        reduced = torch.linalg.solve(basis.T @ case.total @ basis, basis.T @ first)
        expected = (basis @ reduced).view(case.start.shape)
        torch.testing.assert_close(
            solution.kept[at], expected, rtol=0, atol=1e-6 * float(expected.norm())
        )
        following = case.total @ basis[:, -1]
        for _ in range(2):
            following = following - basis @ (basis.T @ following)
        basis = torch.cat([basis, (following / following.norm()).unsqueeze(-1)], -1)


# When it stops, and what it keeps


def test_tolerance_stops_as_converged() -> None:
    case = kroneckers(0, (6, 7), 3, 10)
    everything = conjugate_gradients(case.system(), Limits(60)).trace.residuals
    for tolerance in (1e-2, 1e-5, 1e-9):
        first = next(at for at, r in enumerate(everything) if r <= tolerance)
        solution = conjugate_gradients(case.system(), Limits(200, tolerance, keep=[3, 200]))
        assert solution.status is Status.CONVERGED
        assert solution.iterations == first
        assert solution.residual <= tolerance * (1 + 1e-5)
        assert case.residual(case.start + solution.correction) <= tolerance * (1 + 1e-5)
        assert torch.equal(solution.kept[200], solution.correction)


def test_what_reached_the_tolerance_is_not_given_up_for_a_tie() -> None:
    """Near the solution objectives are equal up to rounding when residuals are not yet."""
    for seed in range(60):
        case = kroneckers(seed, (5, 6), 2, 5)
        solution = conjugate_gradients(case.system(), Limits(200, tolerance=1e-11))
        assert solution.status is Status.CONVERGED
        assert solution.residual < 1.01e-11


def test_a_start_that_solves_the_system_is_exact() -> None:
    case = kroneckers(0, (4, 5), 3, 10)
    shared = [(operator, case.weights[0]) for operator in case.operators]
    system = make_system(shared, case.weights[0])
    for solution in (
        conjugate_gradients(system, Limits(50, keep=[0, 7])),
        solve_kronecker_sum(system, Limits(50, keep=[0, 7])),
    ):
        assert solution.status is Status.EXACT
        assert solution.iterations == 0
        assert not solution.correction.any()
        assert not solution.kept[0].any()
        assert not solution.kept[7].any()
        assert solution.residual == 0
    # The solution of different models is exact up to rounding, which a tolerance tells.
    solved = conjugate_gradients(case.system(case.solve()), Limits(50, tolerance=1e-12))
    assert solved.status is Status.EXACT
    assert solved.iterations == 0


def test_kept_iterates_are_those_of_shorter_runs() -> None:
    case = kroneckers(0, (6, 7), 3, 100)
    keep = (0, 1, 10, 20, 25, 40)
    for solve in (conjugate_gradients, solve_kronecker_sum):
        solution = solve(case.system(), Limits(40, keep=keep))
        assert solution.status is Status.FINISHED
        assert solution.iterations == 40
        assert set(solution.kept) == set(keep)
        for at in keep:
            shorter = solve(case.system(), Limits(at))
            assert shorter.iterations == at
            assert torch.equal(solution.kept[at], shorter.correction)
        assert torch.equal(solution.kept[40], solution.correction)
        assert len(solution.trace.residuals) == len(solution.trace.objectives) == 41


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_system_is_left_as_it_was(dtype: torch.dtype) -> None:
    case = kroneckers(0, (6, 7), 3, 100, dtype)
    factors = [
        factor
        for operator in case.operators
        if isinstance(operator, Kronecker)
        for factor in (operator.outputs, operator.inputs)
    ]
    system = case.system()
    for solve in (conjugate_gradients, solve_kronecker_sum):
        before = [tensor.clone() for tensor in (system.residual, *factors)]
        solve(system, Limits(30), held_out=system)
        for tensor, copy in zip((system.residual, *factors), before, strict=True):
            assert torch.equal(tensor, copy)


# Rounding

Solver = Callable[[System, Limits], Solution]


def in_float32(system: System, limits: Limits) -> Solution:
    return conjugate_gradients(system, limits, products=torch.float32)


def with_jacobi(system: System, limits: Limits) -> Solution:
    precondition = jacobi(system.operator)
    return conjugate_gradients(system, limits, precondition=precondition, products=torch.float32)


def barely_damped(system: System, limits: Limits) -> Solution:
    return solve_kronecker_sum(system, limits, damping=1e-4)


SOLVERS: list[Solver] = [
    conjugate_gradients,
    in_float32,
    with_jacobi,
    solve_kronecker_sum,
    barely_damped,
]
each_solver = pytest.mark.parametrize("solve", SOLVERS)


@each_solver
def test_more_iterations_do_no_harm(solve: Solver) -> None:
    """Condition 1e6 for each factor, so 1e12 for each product, from small float32 statistics."""
    case = kroneckers(1, (12, 16), 3, 1e6, torch.float32, 1e-10)
    short, long = (solve(case.system(), Limits(iterations)) for iterations in (100, 5000))
    after_100 = case.objective(case.start + short.correction)
    after_5000 = case.objective(case.start + long.correction)
    assert after_5000 <= after_100 * (1 + 1e-9)
    assert after_5000 < 0.999 * after_100  # there was something left to do
    best = case.objective(case.solve())
    assert after_5000 < 1.1 * best


@pytest.mark.parametrize("iterations", [20, 2000])
@each_solver
def test_reports_hold_for_the_statistics_as_given(solve: Solver, iterations: int) -> None:
    case = kroneckers(1, (12, 16), 3, 1e6, torch.float32, 1e-10)
    solution = solve(case.system(), Limits(iterations))
    x = case.start + solution.correction
    assert solution.objective == pytest.approx(case.objective(x), rel=1e-6)
    assert solution.residual == pytest.approx(case.residual(x), rel=1e-2)


@pytest.mark.parametrize("num_rows", [(4, 200), (10, 10)])
@each_solver
def test_rounding_of_singular_factors_does_not_run_away(
    solve: Solver, num_rows: tuple[int, int]
) -> None:
    """Few examples: the factors are singular, and rounded to float32 not even positive.

    So they are freed from what is only rounding, as the K-FAC objective does. With the
    statistics before rounding as the judge, going on must not spoil what was reached.
    """
    shape = (32, 40)
    generator = seeded(0)
    exact, rounded = [], []
    for _ in range(3):
        factors = []
        for d, n in zip(shape, num_rows, strict=True):
            rows = normal(generator, n, d) * torch.arange(1, d + 1, dtype=F64) ** -0.5
            factors.append(rows.T @ rows / n)
        exact.append(factors)
        rounded.append([without_rounding(factor.float(), torch.float32) for factor in factors])
    judge = Case([(Kronecker(o, g), torch.kron(o, g)) for o, g in exact], shape)
    terms = [(Kronecker(o, g), w) for (o, g), w in zip(rounded, judge.weights, strict=True)]
    system = make_system(terms, judge.start)
    # In float64, and stopped long before its own rounding: the right size of a correction.
    reference = solve(judge.system(), Limits(1000, tolerance=1e-5))
    size = float(reference.correction.norm())
    before = judge.objective(judge.start)
    for iterations in (40, 1500):
        solution = solve(system, Limits(iterations))
        assert float(solution.correction.norm()) < 4 * size
        # A sum of squares, but for what rounding the statistics does to it.
        assert solution.objective > -1e-6 * before
    assert judge.objective(judge.start + solution.correction) < 1e-8 * before


class Deceiving(Operator):
    """A Gram whose float32 products are too small, from the 26th on."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.num_products = 0

    def __call__(self, x: Tensor, /) -> Tensor:
        self.num_products += x.dtype == torch.float32
        deceives = x.dtype == torch.float32 and self.num_products > 25
        return x @ self.matrix.to(x.dtype) * (0.4 if deceives else 1.0)

    def __mul__(self, scale: float, /) -> Operator:
        raise NotImplementedError

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()


def test_the_last_iterate_known_to_be_good_is_kept() -> None:
    """Wrong products make steps too long; what that does is seen when the residual is renewed."""
    matrix = spread(seeded(0), 60, 1e4)
    start = torch.zeros(3, 60, dtype=F64)
    weights = [normal(seeded(model), 3, 60) for model in (1, 2)]
    keep = (10, 20, 50, 1000)

    def solve(iterations: int) -> Solution:
        system = make_system([(Gram(matrix / 2), w) for w in weights], start)
        system = replace(system, operator=Deceiving(matrix))
        return conjugate_gradients(system, Limits(iterations, keep=keep), products=torch.float32)

    bad = solve(1000)
    assert bad.status is Status.FLOOR
    assert bad.iterations in (20, 40)
    assert len(bad.trace.residuals) - 1 < 1000
    good = solve(bad.iterations)
    assert good.status is Status.FINISHED
    assert torch.equal(bad.correction, good.correction)
    assert bad.objective == good.objective
    assert bad.residual == good.residual
    for at in keep:
        expected = good.kept[at] if at <= good.iterations else good.correction
        assert torch.equal(bad.kept[at], expected)


# Preconditioning, held-out data


def test_jacobi_divides_by_the_diagonal() -> None:
    case = mixture(0, (3, 4), ["gram", "kronecker", "diagonal"])
    r = normal(seeded(1), 3, 4)
    expected = r / case.total.diagonal().view(3, 4)
    torch.testing.assert_close(jacobi(case.system().operator)(r), expected)
    unseen = jacobi(Diagonal(torch.tensor([0.0, 2.0])))
    assert unseen(torch.ones(2, dtype=F64)).tolist() == [0.0, 0.5]


def few_examples(
    generator: torch.Generator, shape: tuple[int, int]
) -> list[tuple[Operator, Tensor]]:
    """K-FAC of three models from as many examples as the factors need to be regular."""
    terms: list[tuple[Operator, Tensor]] = []
    for _ in range(3):
        factors = []
        for d in shape:
            rows = normal(generator, d + 2, d) * torch.arange(1, d + 1, dtype=F64) ** -0.5
            factors.append(rows.T @ rows / len(rows))
        terms.append((Kronecker(factors[0], factors[1]), torch.kron(*factors)))
    return terms


@settings(max_examples=10, deadline=None)
@given(seeds)
@pytest.mark.parametrize("solve", [conjugate_gradients, solve_kronecker_sum])
def test_held_out_objective_picks_the_iterate(solve: Callable[..., Solution], seed: int) -> None:
    shape = (6, 8)
    generator = seeded(seed)
    case = Case(few_examples(generator, shape), shape, seed)
    unseen = Case(few_examples(generator, shape), shape, seed)  # same weights, same start
    keep = range(41)
    everything = solve(case.system(), Limits(40, keep=keep))
    expected = [unseen.objective(unseen.start + everything.kept[at]) for at in keep]
    solution = solve(case.system(), Limits(40, keep=keep), held_out=unseen.system())
    seen = len(solution.trace.held_out)
    # Products are float32 for the Kronecker sum.
    np.testing.assert_allclose(solution.trace.held_out, expected[:seen], rtol=1e-5)
    best = int(np.argmin(expected[:seen]))
    assert expected[solution.iterations] == pytest.approx(expected[best], rel=1e-5)
    assert abs(solution.iterations - best) <= 1
    assert solution.status is (
        Status.HELD_OUT if solution.iterations < seen - 1 else Status.FINISHED
    )
    torch.testing.assert_close(
        solution.correction, everything.kept[solution.iterations], rtol=1e-4, atol=1e-6
    )
    # It looks ten iterations ahead, and no further.
    assert seen == 41 or seen == solution.iterations + 11
    for at in keep:
        kept = everything.kept[min(at, solution.iterations)]
        torch.testing.assert_close(solution.kept[at], kept, rtol=1e-4, atol=1e-6)
    x = case.start + solution.correction
    assert solution.objective == pytest.approx(case.objective(x), rel=1e-5)
    assert solution.residual == pytest.approx(case.residual(x), rel=1e-3, abs=1e-7)


# Devices


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_stays_on_the_device_of_the_statistics() -> None:
    def on_both(solve: Callable[[torch.device], Solution]) -> None:
        expected, found = (solve(torch.device(name)) for name in ("cpu", "cuda"))
        assert found.correction.device.type == "cuda"
        torch.testing.assert_close(
            found.correction.cpu(), expected.correction, rtol=1e-4, atol=1e-6
        )
        for at, kept in found.kept.items():
            torch.testing.assert_close(kept.cpu(), expected.kept[at], rtol=1e-4, atol=1e-6)

    case = kroneckers(0, (5, 6), 3, 10)
    factors = [(op.outputs, op.inputs) for op in case.operators if isinstance(op, Kronecker)]
    limits = Limits(10, keep=[0, 5])

    def system(device: torch.device, kind: str, num_models: int = 3) -> System:
        operators: list[Operator] = []
        for outputs, inputs in factors[:num_models]:
            o, g = outputs.to(device), inputs.to(device)
            match kind:
                case "identity":
                    operators.append(Identity(2.0))
                case "diagonal":
                    operators.append(Diagonal(torch.outer(o.diagonal(), g.diagonal())))
                case "gram":
                    operators.append(Gram(g))
                case "low rank":
                    operators.append(LowRank(g))
                case "kronecker":
                    operators.append(Kronecker(o, g))
        weights = [w.to(device) for w in case.weights[:num_models]]
        return make_system(zip(operators, weights, strict=True), case.start.to(device))

    def trajectory(device: torch.device) -> Solution:
        gram = system(device, "gram")
        return follow_trajectory(gram, decompose(dense(gram.operator)), limits, gram)

    on_both(lambda device: solve_diagonal(system(device, "identity")))
    on_both(lambda device: solve_diagonal(system(device, "diagonal")))
    on_both(lambda device: solve_gram(system(device, "gram")))
    on_both(lambda device: solve_gram(system(device, "low rank"), ridge=0.1))
    on_both(trajectory)
    on_both(lambda device: solve_pair(system(device, "kronecker", 2)))
    on_both(lambda device: conjugate_gradients(system(device, "kronecker"), limits))
    on_both(
        lambda device: solve_kronecker_sum(
            system(device, "kronecker"), limits, held_out=system(device, "kronecker")
        )
    )


def test_orthogonal_residuals_give_the_iterates_of_exact_arithmetic() -> None:
    """Plain float64 loses its way on a vector's ill-conditioned block; with them kept, it does not."""
    generator = seeded(3)
    blocks = [spread(generator, 120, 1e8) for _ in range(2)]
    terms = [(Gram(block), normal(generator, 1, 120)) for block in blocks]
    system = make_system(iter(terms), torch.zeros(1, 120, dtype=F64))
    limits = Limits(60, tolerance=0.0)
    exact = follow_trajectory(system, decompose(dense(system.operator), F64), limits).correction
    kept = conjugate_gradients(system, limits, orthogonalize=True).correction
    plain = conjugate_gradients(system, limits).correction
    assert float((kept - exact).norm() / exact.norm()) < 1e-6
    assert float((plain - exact).norm() / exact.norm()) > 1e-3
