"""Solutions of systems that fall apart in the models' task subspaces: see `task_subspaces`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from matsmerge.linalg.conjugate_gradients import conjugate_gradients, restate
from matsmerge.linalg.joint_products import is_joinable, join_products
from matsmerge.linalg.kronecker_sums import solve_pair
from matsmerge.linalg.operators import (
    Diagonal,
    Kronecker,
    Operator,
    Sum,
    terms_of,
)
from matsmerge.linalg.system import Limits, Solution, Status, System, rate
from matsmerge.linalg.task_subspaces import (
    Apart,
    Coordinates,
    dense_factor,
    fall_apart,
    products_of,
)
from matsmerge.linalg.truncated import Truncated

_F32, _F64 = torch.float32, torch.float64


def solve_apart(system: System, stored: torch.dtype = torch.float32) -> Solution:
    """In closed form: a Gram of any models, or Kronecker products of two.

    The border is divided by its eigenvalues.
    """
    apart = fall_apart(products_of(system.operator, system.residual.shape), stored)
    seen_from = Coordinates(apart, system.residual)
    x = torch.where(apart.border > 0, seen_from.residual / apart.border, 0)
    is_full = apart.is_border_full
    if apart.has_inner:
        products = (
            Kronecker(dense_factor(t.outputs), dense_factor(t.inputs), t.scale) for t in apart.inner
        )
        part = System(Sum(tuple(products)), seen_from.residual[:-1, :-1], 0.0, 1.0)
        inner = solve_pair(part, stored)
        x[:-1, :-1] = inner.correction
        is_full = is_full and inner.status is Status.SOLVED
    status = Status.SOLVED if is_full else Status.SINGULAR
    return rate(system, seen_from.leave(x), status)


def flow_apart(
    system: System, time: float, share: float, stored: torch.dtype = torch.float32
) -> Solution:
    """Where gradient flow on a Gram is after a time, in a share of the directions.

    All directions outside of the subspaces are alike, and moved in together or not at all.
    """
    apart = fall_apart(products_of(system.operator, system.residual.shape), stored)
    seen_from = Coordinates(apart, system.residual)
    assert not apart.has_inner, "not a Gram"
    num_kept = max(1, math.ceil(share * system.residual.shape[1] - 1e-9))
    values = apart.border[-1]
    flow = torch.where(values > 0, -torch.expm1(-values * time) / values, 0)
    num = len(values) - 1
    if num_kept <= num:
        flow[: num - num_kept] = 0  # eigenvalues are in ascending order
        flow[-1] = 0
    return rate(system, seen_from.leave(seen_from.residual * flow), Status.FILTERED)


def solve_beside_diagonal(system: System) -> Solution:
    """A Gram beside a diagonal, Δ + U C Uᵀ, by the formula of Woodbury (1950).

        (Δ + U C Uᵀ)⁻¹ = Δ⁻¹ - Δ⁻¹ U (1 + C UᵀΔ⁻¹U)⁻¹ C UᵀΔ⁻¹

    U are the leading directions of all models side by side, and Δ what is left of each and what
    `off_diagonal` puts on the diagonal.
    """
    num_inputs = system.residual.shape[1]
    diagonal = system.residual.new_zeros(num_inputs, dtype=torch.float64)
    vectors, values = [], []
    for term in products_of(system.operator, system.residual.shape):
        outputs, inputs = term.outputs, term.inputs
        assert isinstance(outputs, Truncated)
        assert isinstance(inputs, Truncated)
        scale = outputs.rest * term.scale
        vectors.append(inputs.vectors)
        values.append((inputs.values - inputs.rest) * scale)
        diagonal += inputs.rest * scale
    for other in terms_of(system.operator):
        if isinstance(other, Diagonal):
            diagonal += other.values.double().view(-1)
    u, c = torch.cat(vectors, 1), torch.cat(values)
    divided = torch.where(diagonal > 0, 1 / diagonal, 0)
    middle = c[:, None] * (u.mT @ (u * divided[:, None]))
    middle.diagonal().add_(1)
    inverse = torch.linalg.solve(middle, torch.diag(c))
    change = ((system.residual * divided) @ u) @ inverse
    correction = (system.residual - change @ u.mT) * divided
    status = Status.SOLVED if bool((diagonal > 0).all()) else Status.SINGULAR
    return rate(system, correction, status)


def iterate_apart(
    system: System,
    limits: Limits,
    *,
    preconditioner: Literal["none", "kronecker"] = "kronecker",
    damping: float = 0.01,
    held_out: System | None = None,
    stored: torch.dtype = torch.float32,
    max_kept: int = 0,
) -> Solution:
    """Conjugate gradients on all parts at once, as `solve_kronecker_sum` on the whole.

    Without a preconditioner the iterates are those of the whole system; residuals are kept
    orthogonal where they have at most `max_kept` elements together. The preconditioner is a
    division by the operator's diagonal in the bases of `fall_apart`, which take the place of the
    nearest Kronecker product's: products may be in float32 there, too.
    """
    shape = system.residual.shape
    if not bool(system.residual.any()):
        return conjugate_gradients(system, replace(limits, iterations=0))
    products = products_of(system.operator, shape)
    largest = max(product.trace for product in products)
    apart = fall_apart(products, stored)
    seen_from = Coordinates(apart, system.residual)
    diagonal = apart.border.clone()
    for term in apart.inner:
        diagonal[:-1, :-1] += term.diagonal()
    is_plain = preconditioner == "none"
    mean = float((diagonal * apart.multiplicity).sum()) / (shape[0] * shape[1])
    divisor = torch.ones_like(diagonal) if is_plain else (diagonal + damping * mean) / largest
    inverse = torch.where(diagonal > 0, 1 / divisor, 0)

    def see(other: System, operator: _Function, residual: Tensor) -> System:
        return System(operator, residual / largest, other.objective / largest, other.size / largest)

    def apply_held_out(x: Tensor) -> Tensor:
        assert held_out is not None
        return seen_from.enter(held_out.operator(seen_from.leave(x.double()))) / largest

    solution = conjugate_gradients(
        see(system, _bordered(apart, 1 / largest), seen_from.residual),
        limits,
        precondition=lambda r: r * inverse,
        held_out=held_out
        and see(held_out, _Function(apply_held_out), seen_from.enter(held_out.residual)),
        products=torch.float64 if is_plain else torch.float32,
        orthogonalize=is_plain and diagonal.numel() * limits.iterations <= max_kept,
    )
    solution = replace(
        solution,
        correction=seen_from.leave(solution.correction),
        objective=solution.objective * largest,
        trace=solution.trace.times(largest),
        kept={at: seen_from.leave(kept) for at, kept in solution.kept.items()},
    )
    # A regular system is seen as it is; of a singular one, not all is.
    return solution if apart.is_regular else restate(system, solution)


@dataclass(frozen=True)
class _Function(Operator):
    """An operator that is given by what it does."""

    apply: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.apply(x)

    def __mul__(self, scale: float, /) -> "_Function":
        return _Function(lambda x: self.apply(x) * scale)

    def diagonal(self) -> Tensor:
        raise NotImplementedError("systems of this kind are solved with a diagonal that is given")


def _bordered(apart: Apart, scale: float) -> _Function:
    """The operator on the unknowns: `inner`, and the border multiplied."""
    terms = apart.raised_inner
    if not terms or not all(map(is_joinable, terms)):
        return _beside_border(apart.border * scale, [term * scale for term in terms])
    joint = join_products(terms) * scale
    if not apart.is_regular:
        return _beside_border(apart.border * scale, [joint])
    # What the rest of one side does beside the other's directions is diagonal in these bases.
    border = apart.border * scale
    border[:-1, :-1] = border[:-1, -1:] + border[-1, :-1] - border[-1, -1]
    rounded = {dtype: (border.to(dtype), joint.to(dtype)) for dtype in (_F32, _F64)}

    def apply(x: Tensor) -> Tensor:
        border, joint = rounded[x.dtype]
        image = x * border
        along = joint.inside(x[:-1, :-1] @ joint.u)
        image[:-1, :-1] += along.mul_(joint.s) @ joint.u.mT
        return image

    return _Function(apply)


def _beside_border(border: Tensor, terms: Sequence[Operator]) -> _Function:
    def apply(x: Tensor) -> Tensor:
        image = x * border.to(x.dtype)
        for term in terms:
            image[:-1, :-1] += term(x[:-1, :-1])
        return image

    return _Function(apply)
