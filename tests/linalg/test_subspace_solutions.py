"""Systems of truncated products, solved apart, against dense float64 solutions of the whole."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from matsmerge.linalg.conjugate_gradients import conjugate_gradients, solve_kronecker_sum
from matsmerge.linalg.eigenbasis import decompose, solve_by_flow
from matsmerge.linalg.kronecker_sums import hold
from matsmerge.linalg.operators import Diagonal, Gram, Kronecker, Operator, TruncatedProduct
from matsmerge.linalg.subspace_solutions import (
    flow_apart,
    iterate_apart,
    solve_apart,
    solve_beside_diagonal,
)
from matsmerge.linalg.system import Limits, Status, System, make_system
from matsmerge.linalg.task_subspaces import dense_factor, products_of
from matsmerge.linalg.truncated import Truncated, isotropic, truncate

F64 = torch.float64
OUT, IN = 9, 11


def moment(d: int, generator: torch.Generator) -> Tensor:
    """Of sizes that fall, as real ones do."""
    rows = torch.randn(4 * d, d, dtype=F64, generator=generator)
    rows *= torch.arange(1, d + 1) ** -0.5
    turn = torch.linalg.qr(torch.randn(d, d, dtype=F64, generator=generator)).Q
    turned: Tensor = turn @ (rows.mT @ rows / (4 * d)) @ turn.mT
    return turned


def make_terms(
    ranks: Sequence[tuple[int, int | None]], seed: int = 0, *, gram: bool = False
) -> list[tuple[Operator, Tensor]]:
    """Truncated products and weights; inputs of rank None are whole matrices."""
    generator = torch.Generator().manual_seed(seed)
    terms: list[tuple[Operator, Tensor]] = []
    for of_outputs, of_inputs in ranks:
        outputs, inputs = moment(OUT, generator), moment(IN, generator)
        weights = torch.randn(OUT, IN, dtype=F64, generator=generator)
        o = isotropic(OUT) if gram else truncate(outputs, of_outputs)
        g = inputs if of_inputs is None else truncate(inputs, of_inputs)
        terms.append((TruncatedProduct(o, g, 0.7 + len(terms)), weights))
    return terms


START = torch.randn(OUT, IN, dtype=F64, generator=torch.Generator().manual_seed(9))
THREE: list[tuple[int, int | None]] = [(2, 3), (1, 2), (3, 1)]


def dense(operator: Operator) -> Tensor:
    diagonals = [t for t in getattr(operator, "terms", ()) if isinstance(t, Diagonal)]
    matrix = torch.zeros(OUT * IN, OUT * IN, dtype=F64)
    for p in products_of(operator, torch.Size((OUT, IN))):
        matrix += p.scale * torch.kron(dense_factor(p.outputs), dense_factor(p.inputs))
    for diagonal in diagonals:
        matrix += torch.diag(diagonal.values.double().expand(OUT, IN).flatten())
    return matrix


def solve_dense(system: System) -> Tensor:
    inverse: Tensor = torch.linalg.pinv(dense(system.operator), hermitian=True, rtol=1e-10)
    return (inverse @ system.residual.flatten()).view(OUT, IN)


def whole(terms: Sequence[tuple[Operator, Tensor]]) -> System:
    """The same system with every factor written out."""
    written = []
    for operator, weights in terms:
        p = products_of(operator, torch.Size((OUT, IN)))[0]
        factors = dense_factor(p.outputs), dense_factor(p.inputs)
        written.append((Kronecker(*factors, p.scale), weights))
    return make_system(written, START)


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("ranks", [THREE[:1], THREE[:2], [(2, None), (3, None)]], ids=str)
def test_products_of_two_models_in_closed_form(ranks: list[tuple[int, int | None]]) -> None:
    system = make_system(make_terms(ranks), START)
    solution = solve_apart(system, F64)
    assert off(solution.correction, solve_dense(system)) < 1e-9
    assert solution.status is Status.SOLVED
    assert solution.residual < 1e-10
    expected = 0.5 * float(
        sum(
            ((START + solution.correction - w) * c(START + solution.correction - w)).sum()
            for c, w in make_terms(ranks)
        )
    )
    assert solution.objective == pytest.approx(expected)


@pytest.mark.parametrize("num", [1, 3])
def test_a_gram_of_any_number_of_models_in_closed_form(num: int) -> None:
    system = make_system(make_terms(THREE[:num], gram=True), START)
    solution = solve_apart(system, F64)
    assert off(solution.correction, solve_dense(system)) < 1e-10
    assert solution.status is Status.SOLVED


@pytest.mark.parametrize("gram", [False, True])
def test_directions_that_no_model_has_stay_at_the_start(gram: bool) -> None:
    terms: list[tuple[Operator, Tensor]] = []
    for operator, weights in make_terms(THREE[:2], gram=gram):
        assert isinstance(operator, TruncatedProduct)
        g = operator.inputs
        assert isinstance(g, Truncated)
        cut = Truncated(g.vectors, g.values, 0.0)
        terms.append((TruncatedProduct(operator.outputs, cut), weights))
    system = make_system(terms, START)
    for solution in (
        solve_apart(system, F64),
        iterate_apart(system, Limits(200), preconditioner="none", stored=F64, max_kept=1 << 20),
        *([] if gram else [iterate_apart(system, Limits(200), stored=F64)]),
    ):
        assert off(solution.correction, solve_dense(system)) < 1e-7
        assert solution.residual < 1e-8
    assert solve_apart(system, F64).status is Status.SINGULAR


@pytest.mark.parametrize("strength", [0.0, 0.3])
@pytest.mark.parametrize(
    "ranks", [THREE, [(2, None), (3, None), (1, None)], [(2, 3), (2, None), (1, 2)]], ids=str
)
def test_preconditioned_iterations_go_to_the_solution(
    ranks: list[tuple[int, int | None]], strength: float
) -> None:
    system = hold(make_system(make_terms(ranks), START), strength)
    solution = iterate_apart(system, Limits(300), stored=F64)
    assert off(solution.correction, solve_dense(system)) < 1e-8
    assert solution.residual < 1e-9
    assert solution.trace.objectives[0] == pytest.approx(system.objective)
    assert solution.objective == pytest.approx(solution.trace.objectives[-1], rel=1e-6)


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("num", [0, 1, 4, 9])
def test_plain_iterates_are_those_of_the_whole_operator(num: int, gram: bool) -> None:
    terms = make_terms(THREE, gram=gram)
    limits = Limits(9, keep=(num,))
    found = iterate_apart(
        make_system(terms, START), limits, preconditioner="none", stored=F64, max_kept=1 << 20
    )
    expected = conjugate_gradients(whole(terms), limits, orthogonalize=True)
    torch.testing.assert_close(found.kept[num], expected.kept[num], rtol=1e-9, atol=1e-11)
    assert found.trace.objectives == pytest.approx(expected.trace.objectives, rel=1e-8)
    # Residuals are relative to a norm that is summed in float32.
    rounding = OUT * IN * torch.finfo(torch.float32).eps
    assert found.trace.residuals == pytest.approx(expected.trace.residuals, rel=rounding)
    assert found.residual == pytest.approx(expected.residual, rel=rounding)


@pytest.mark.parametrize("preconditioner", ["none", "kronecker"])
def test_the_best_iterate_on_held_out_data_is_kept(preconditioner: Any) -> None:
    """Held-out moments have subspaces of their own, and may be whole."""
    terms = make_terms(THREE)
    others = make_terms(THREE[:2], seed=1)
    held_out = make_system([*others, (Gram(torch.eye(IN, dtype=F64)), START + 1)], START)
    options: dict[str, Any] = {"preconditioner": preconditioner, "stored": F64}
    system, keep = make_system(terms, START), range(16)
    found = iterate_apart(system, Limits(15), held_out=held_out, **options)
    free = iterate_apart(system, Limits(15, keep=keep), **options)

    def objective(correction: Tensor) -> float:
        return held_out.objective_at(correction, held_out.residual - held_out.operator(correction))

    expected = [objective(free.kept[at]) for at in keep]
    num = len(found.trace.held_out)
    assert found.trace.held_out == pytest.approx(expected[:num], rel=1e-5)
    assert found.iterations == expected[:num].index(min(expected[:num]))
    assert found.iterations < num - 1
    assert found.status is Status.HELD_OUT


def test_ten_iterations_reach_about_as_far_as_on_the_whole() -> None:
    terms = make_terms(THREE)
    system = make_system(terms, START)
    found = iterate_apart(system, Limits(10)).objective
    reference = solve_kronecker_sum(whole(terms), Limits(10)).objective
    least = solve_apart_or_dense(system)
    assert found - least < 3 * (reference - least) + 1e-6 * system.objective


def solve_apart_or_dense(system: System) -> float:
    correction = solve_dense(system)
    return system.objective_at(correction, system.residual - system.operator(correction))


@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_a_gram_beside_a_diagonal(share: float) -> None:
    terms: list[tuple[Operator, Tensor]] = []
    for operator, weights in make_terms(THREE, gram=True):
        left = operator.diagonal()[:1] * (1 - share)
        terms.append((operator * share + Diagonal(left), weights))
    system = make_system(terms, START)
    solution = solve_beside_diagonal(system)
    assert off(solution.correction, solve_dense(system)) < 1e-10
    assert solution.status is Status.SOLVED


def test_a_diagonal_that_lacks_an_input() -> None:
    vectors = torch.eye(IN, dtype=F64)[:, :2]
    inputs = Truncated(vectors, torch.tensor([2.0, 1.0], dtype=F64), 0.0)
    operator = TruncatedProduct(isotropic(OUT), inputs) + Diagonal(inputs.diagonal()[None])
    system = make_system([(operator, START + 1)], START)
    solution = solve_beside_diagonal(system)
    expected = torch.zeros(OUT, IN, dtype=F64)
    expected[:, :2] = 1
    torch.testing.assert_close(solution.correction, expected)
    assert solution.status is Status.SINGULAR


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_the_flow_on_a_gram(share: float) -> None:
    """As on the whole matrix, where no direction is one of many that are alike."""
    system = make_system(make_terms(THREE, gram=True), START)
    matrix = torch.zeros(IN, IN, dtype=F64)
    for p in products_of(system.operator, torch.Size((OUT, IN))):
        matrix += p.scale * dense_factor(p.inputs)
    expected = solve_by_flow(system, decompose(matrix, F64), 0.7, share)
    found = flow_apart(system, 0.7, share, F64)
    torch.testing.assert_close(found.correction, expected.correction)
    assert found.residual == pytest.approx(expected.residual)
    assert found.objective == pytest.approx(expected.objective)


@pytest.mark.parametrize("gram", [False, True])
def test_models_that_agree_leave_nothing_to_solve(gram: bool) -> None:
    system = make_system([(c, START) for c, _ in make_terms(THREE[:2], gram=gram)], START)
    assert not bool(solve_apart(system).correction.any())
    solution = iterate_apart(system, Limits(3, keep=(2,)))
    assert solution.status is Status.EXACT
    assert not bool(solution.correction.any())
    assert not bool(solution.kept[2].any())


@pytest.mark.parametrize("gram", [False, True])
def test_the_order_of_models_does_not_matter(gram: bool) -> None:
    terms = make_terms(THREE, gram=gram)
    one, other = (
        iterate_apart(make_system(order, START), Limits(6), stored=F64).correction
        for order in (terms, terms[::-1])
    )
    assert off(one, other) < 1e-6
