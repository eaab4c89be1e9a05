"""Models whose layers received other inputs than the merged one does, and starts that hold on."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from matsmerge.linalg.closed_form import solve_gram
from matsmerge.linalg.conjugate_gradients import solve_kronecker_sum
from matsmerge.linalg.kronecker_sums import hold
from matsmerge.linalg.operators import Gram, Kronecker, Operator, Paired
from matsmerge.linalg.system import Limits, make_system

F64 = torch.float64
OUT, IN, ROWS = 4, 5, 40


class Model:
    """Weights, what the layer receives in the merged model, and what it received in its own."""

    def __init__(self, seed: int, drift: float) -> None:
        g = torch.Generator().manual_seed(seed)
        self.weights = torch.randn(OUT, IN, generator=g, dtype=F64)
        self.inputs = torch.randn(ROWS, IN, generator=g, dtype=F64)
        self.own_inputs = self.inputs + drift * torch.randn(ROWS, IN, generator=g, dtype=F64)
        root = torch.randn(OUT, OUT, generator=g, dtype=F64)
        self.metric = root @ root.mT + 0.1 * torch.eye(OUT, dtype=F64)

    @property
    def gram(self) -> Tensor:
        return self.inputs.mT @ self.inputs / ROWS

    @property
    def pairs(self) -> Tensor:
        rows = torch.cat([self.inputs, self.own_inputs - self.inputs], 1)
        return rows.mT @ rows / ROWS

    def term(self, *, with_metric: bool) -> tuple[Operator, Tensor]:
        if with_metric:
            own: Operator = Kronecker(self.metric, self.gram)
            return Paired(own, Kronecker(self.metric, self.pairs)), self.weights
        return Paired(Gram(self.gram), Gram(self.pairs)), self.weights

    def loss(self, x: Tensor, *, with_metric: bool) -> Tensor:
        """1/2 E|X z - W z*|², in the metric of the outputs."""
        error = self.inputs @ x.mT - self.own_inputs @ self.weights.mT
        metric = self.metric if with_metric else torch.eye(OUT, dtype=F64)
        return 0.5 * ((error @ metric) * error).sum() / ROWS


def minimum(models: Sequence[Model], start: Tensor, anchor: float, *, with_metric: bool) -> Tensor:
    """What minimises the losses, and anchor/2 |X - X0|², from a dense Hessian by autograd."""

    def total(x: Tensor) -> Tensor:
        losses = [model.loss(x, with_metric=with_metric) for model in models]
        return torch.stack(losses).sum() + 0.5 * anchor * (x - start).square().sum()

    hessian = torch.autograd.functional.hessian(total, start).reshape(OUT * IN, OUT * IN)
    x = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(x), x)
    step: Tensor = torch.linalg.solve(hessian, gradient.flatten())
    return start - step.view(OUT, IN)


@pytest.mark.parametrize("anchor", [0.0, 0.3])
@pytest.mark.parametrize("with_metric", [False, True])
def test_the_solution_gives_what_each_model_gave(with_metric: bool, anchor: float) -> None:
    models = [Model(seed, drift=0.7) for seed in range(3)]
    start = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(9), dtype=F64)
    plain = make_system((model.term(with_metric=with_metric) for model in models), start)
    system = hold(plain, anchor)
    if with_metric:
        solution = solve_kronecker_sum(
            system, Limits(60), preconditioner="kronecker", damping=0.01, stored=F64
        )
    else:
        solution = solve_gram(system, stored=F64)
    strength = anchor * float(plain.operator.diagonal().mean())
    expected = minimum(models, start, strength, with_metric=with_metric)
    found = start + solution.correction
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
    losses = [float(model.loss(start, with_metric=with_metric)) for model in models]
    assert system.objective == pytest.approx(sum(losses), rel=1e-9)
    losses = [float(model.loss(found, with_metric=with_metric)) for model in models]
    held = 0.5 * strength * float((found - start).square().sum())
    assert solution.objective == pytest.approx(sum(losses) + held, rel=1e-6)


@pytest.mark.parametrize("with_metric", [False, True])
def test_inputs_that_did_not_drift_change_nothing(with_metric: bool) -> None:
    models = [Model(seed, drift=0.0) for seed in range(2)]
    start = torch.zeros(OUT, IN, dtype=F64)
    terms = [model.term(with_metric=with_metric) for model in models]
    paired = make_system(terms, start)
    plain = make_system([(o.own, w) for o, w in terms if isinstance(o, Paired)], start)
    assert torch.allclose(paired.residual, plain.residual, rtol=1e-12, atol=1e-12)
    assert paired.objective == pytest.approx(plain.objective, rel=1e-12)
    assert torch.equal(paired.operator(start + 1), plain.operator(start + 1))


def test_a_model_that_has_drifted_and_is_alone_is_matched_where_it_can_be() -> None:
    """The same inputs but for a linear map of them: the solution undoes the map."""
    model = Model(0, drift=0.0)
    turn = torch.randn(IN, IN, generator=torch.Generator().manual_seed(3), dtype=F64)
    model.own_inputs = model.inputs @ turn.mT
    system = make_system([model.term(with_metric=False)], model.weights)
    found = model.weights + solve_gram(system, stored=F64).correction
    assert torch.allclose(found, model.weights @ turn, rtol=1e-8, atol=1e-8)
    assert solve_gram(system, stored=F64).objective == pytest.approx(0, abs=1e-10)


def test_no_hold_leaves_a_system_as_it_is() -> None:
    model = Model(0, drift=0.5)
    system = make_system([model.term(with_metric=True)], model.weights)
    assert hold(system, 0.0) is system
