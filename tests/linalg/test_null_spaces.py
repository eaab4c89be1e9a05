"""Directions that no model has anything for stay at the start, whatever rounding makes of them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from matsmerge.linalg.conjugate_gradients import (
    solve_gram_by_iterations,
    solve_kronecker_sum,
)
from matsmerge.linalg.kronecker_sums import solve_pair
from matsmerge.linalg.operators import Gram, Kronecker, LowRank, Operator, Sum
from matsmerge.linalg.rounding import is_regular, rounding_level, to_unit_size, without_rounding
from matsmerge.linalg.system import Limits, Status, System, make_system

F64 = torch.float64
PRECONDITIONERS = ["none", "jacobi", "kronecker"]


class Models:
    """Weights near a start, and random second moments, some of them without a direction."""

    def __init__(self, shape: tuple[int, int], num: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.start = self.normal(*shape)
        self.weights = [self.start + 0.1 * self.normal(*shape) for _ in range(num)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=F64)

    def unit(self, d: int) -> Tensor:
        direction: Tensor = self.normal(d)
        unit: Tensor = direction / direction.norm()
        return unit

    def moment(self, d: int, without: Tensor | None = None) -> Tensor:
        rows = self.normal(4 * d, d)
        if without is not None:
            rows = rows - (rows @ without)[:, None] * without
        return rows.T @ rows / len(rows)

    def nearest(self, covariances: Sequence[Tensor]) -> Tensor:
        """The correction of the solution nearest to the start, from dense covariances."""
        total = torch.stack(list(covariances)).sum(0)
        right = sum(
            c @ (w - self.start).flatten() for c, w in zip(covariances, self.weights, strict=True)
        )
        inverse: Tensor = torch.linalg.pinv(total, hermitian=True, rtol=1e-10)
        return (inverse @ right).view_as(self.start)


def stored(moment: Tensor) -> Tensor:
    return without_rounding(moment.float(), torch.float32)


def kronecker_system(models: Models, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    terms = [Kronecker(stored(o), stored(g)) for o, g in zip(outputs, inputs, strict=True)]
    return make_system(zip(terms, models.weights, strict=True), models.start)


@pytest.mark.parametrize("iterations", [40, 100, 3000])
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_a_direction_that_all_models_lack(preconditioner: Any, iterations: int) -> None:
    """Gradients at the outputs of a softmax layer sum to zero, in every model."""
    models = Models((5, 12), 3)
    null = torch.ones(5, dtype=F64) / 5**0.5
    outputs = [models.moment(5, null) for _ in range(3)]
    inputs = [models.moment(12) for _ in range(3)]
    expected = models.nearest([torch.kron(o, g) for o, g in zip(outputs, inputs, strict=True)])
    system = kronecker_system(models, outputs, inputs)
    found = solve_kronecker_sum(system, Limits(iterations), preconditioner=preconditioner)
    assert float((null @ found.correction).norm()) < 1e-6 * float(expected.norm())
    if iterations > 40:
        assert float((found.correction - expected).norm()) < 1e-4 * float(expected.norm())


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_a_direction_that_each_model_lacks_in_its_own_way(preconditioner: Any) -> None:
    """Two models lack an output, the third an input: no product of bases shows that to all.

    The null spaces of the two are a little apart after rounding. Without care, the step into that
    gap is 100,000 times as long as all others.
    """
    models = Models((8, 10), 3)
    no_output, no_input = models.unit(8), models.unit(10)
    outputs = [models.moment(8, no_output), models.moment(8, no_output), models.moment(8)]
    inputs = [models.moment(10), models.moment(10), models.moment(10, no_input)]
    expected = models.nearest([torch.kron(o, g) for o, g in zip(outputs, inputs, strict=True)])
    system = kronecker_system(models, outputs, inputs)
    found = solve_kronecker_sum(system, Limits(5000), preconditioner=preconditioner).correction
    assert float(no_output @ found @ no_input) == pytest.approx(0, abs=0.2 * float(expected.norm()))
    seen = torch.outer(no_output, no_input)
    within = found - seen * (found * seen).sum()
    assert float((within - expected).norm()) < 1e-3 * float(expected.norm())


def test_two_models_in_closed_form() -> None:
    models = Models((6, 7), 2)
    no_output, no_input = models.unit(6), models.unit(7)
    outputs = [models.moment(6, no_output) for _ in range(2)]
    inputs = [models.moment(7), models.moment(7, no_input)]
    expected = models.nearest([torch.kron(o, g) for o, g in zip(outputs, inputs, strict=True)])
    found = solve_pair(kronecker_system(models, outputs, inputs)).correction
    assert float((no_output @ found).norm()) < 1e-6 * float(expected.norm())
    assert float((found - expected).norm()) < 1e-4 * float(expected.norm())


@pytest.mark.parametrize("form", ["rows", "matrix"])
def test_gradients_of_a_vector_in_a_subspace(form: str) -> None:
    """Per-example gradients, rounded to float32, leave their subspace a little."""
    models = Models((1, 60), 3)
    basis = torch.linalg.qr(models.normal(60, 20)).Q
    rows = [models.normal(100, 20) @ basis.T for _ in range(3)]
    expected = models.nearest([z.T @ z / len(z) for z in rows])
    operators: list[Operator] = [
        LowRank(z.float(), 1 / len(z)) if form == "rows" else Gram((z.T @ z / len(z)).float())
        for z in rows
    ]
    system = make_system(zip(operators, models.weights, strict=True), models.start)
    found = solve_gram_by_iterations(system, Limits(1000), orthogonalize=True).correction
    lost = found - found @ basis @ basis.T
    assert float(lost.norm()) < 0.2 * float(expected.norm())
    assert float((found - lost - expected).norm()) < 1e-3 * float(expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounding_gave_a_moment_is_taken_away(dtype: torch.dtype) -> None:
    models = Models((1, 1), 1)
    rows = models.normal(3, 8)
    rounded = without_rounding((rows.T @ rows).to(dtype), dtype)
    assert rounded.dtype == F64
    assert not is_regular(rounded)
    values = torch.linalg.eigvalsh(rounded)
    assert float(values[:5].abs().max()) < 1e-14 * float(values[-1])
    assert bool((values[5:] > 1e-3 * values[-1]).all())
    moment = (rows.T @ rows).to(dtype)
    raised = torch.linalg.eigvalsh(without_rounding(moment, dtype, 0.25).double())
    assert float((raised[:5] - 0.25).abs().max()) < float(rounding_level(moment, dtype))


def test_a_regular_moment_stays_as_it_is() -> None:
    moment = Models((1, 1), 1).moment(8).float()
    assert torch.equal(without_rounding(moment, torch.float32), moment)
    assert is_regular(moment)
    counts = torch.tensor([0.0, 2.0, 1.0])
    assert torch.equal(without_rounding(counts, torch.float32), counts.double())


@pytest.mark.parametrize("exponent", [-140, -40, 0, 100, 126])
def test_unit_size_is_exact(exponent: int) -> None:
    moment = Models((1, 1), 1).moment(8).float()
    scaled, size = to_unit_size(moment.double() * 2.0**exponent)
    assert 0.5 <= float(scaled.abs().max()) <= 1
    assert torch.equal(scaled * size, moment.double() * 2.0**exponent)


def test_nothing_has_a_size_too() -> None:
    scaled, size = to_unit_size(torch.zeros(3, 3))
    assert size == 1
    assert not scaled.any()


@pytest.mark.parametrize("seed", range(5))
def test_a_pair_stays_where_one_model_lacks_the_outputs_and_the_other_the_inputs(seed: int) -> None:
    # Along the merged model the right side is not made from the factors as they were rounded.
    models = Models((8, 9), 2, seed)
    few_o = [models.normal(3, 8) for _ in range(2)]
    few_g = [models.normal(4, 9) for _ in range(2)]
    outputs, inputs = ([rows.mT @ rows / len(rows) for rows in few] for few in (few_o, few_g))
    changes = [w - models.start for w in models.weights]
    exact = [Kronecker(o, g) for o, g in zip(outputs, inputs, strict=True)]
    residual = torch.stack([c(d) for c, d in zip(exact, changes, strict=True)]).sum(0)
    terms = tuple(Kronecker(stored(o), stored(g)) for o, g in zip(outputs, inputs, strict=True))
    solution = solve_pair(System(Sum(terms), residual, 1.0, float(residual.norm())))
    nearest = models.nearest([torch.kron(o, g) for o, g in zip(outputs, inputs, strict=True)])
    assert solution.residual < 1e-5
    # Another solution than the nearest, but none that is as far away as the gap is narrow.
    assert float(solution.correction.norm()) < 1000 * float(nearest.norm())
    assert solution.status is Status.SINGULAR
