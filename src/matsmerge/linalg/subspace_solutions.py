"""Solutions of systems that fall apart in the models' task subspaces: see `task_subspaces`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from matsmerge.linalg.conjugate_gradients import conjugate_gradients, restate
from matsmerge.linalg.kronecker_sums import (
    KroneckerBasis,
    decompose_kronecker,
    nearest_kronecker,
    solve_pair,
    trace_of,
)
from matsmerge.linalg.operators import (
    Diagonal,
    Kronecker,
    Operator,
    Sum,
    TruncatedProduct,
    terms_of,
)
from matsmerge.linalg.system import Limits, Solution, Status, System, rate
from matsmerge.linalg.task_subspaces import (
    Apart,
    Coordinates,
    dense_factor,
    fall_apart,
    products_of,
    rounding_of,
    turn,
)
from matsmerge.linalg.truncated import Factor, Truncated


def solve_apart(system: System, stored: torch.dtype = torch.float32) -> Solution:
    """In closed form: a Gram of any models, or Kronecker products of two.

    The border is divided by its eigenvalues.
    """
    apart = fall_apart(products_of(system.operator, system.residual.shape), stored)
    seen_from = Coordinates(apart, system.residual)
    x = torch.where(apart.border > 0, seen_from.residual / apart.border, 0)
    is_full = apart.is_border_full
    if apart.has_inner:
        part = System(Sum(tuple(_kroneckers(apart))), seen_from.residual[:-1, :-1], 0.0, 1.0)
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
    diagonal = torch.zeros(num_inputs, dtype=torch.float64)
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
    orthogonal where they have at most `max_kept` elements together. The preconditioner is the
    nearest Kronecker product for `inner`, and on the border the operator itself.
    """
    shape = system.residual.shape
    if not bool(system.residual.any()):
        return conjugate_gradients(system, replace(limits, iterations=0))
    given = products_of(system.operator, shape)
    largest = max(product.trace for product in given)
    apart = fall_apart(given, stored)
    seen_from = Coordinates(apart, system.residual)
    is_plain = preconditioner == "none"
    dtype = torch.float64 if is_plain else torch.float32
    values = apart.border.clone()
    inner: list[TruncatedProduct] = []
    basis: KroneckerBasis | None = None
    if apart.has_inner:
        basis = decompose_kronecker(nearest_kronecker(_kroneckers(apart)), stored)
        values[:-1, :-1] = basis.values
        inner = [
            _rotate(own, whole, basis, dtype, stored) * (1 / largest)
            for own, whole in zip(apart.inner, given, strict=True)
        ]
    seen = values > 0
    mean = float((values * apart.multiplicity).sum()) / (shape[0] * shape[1])
    divisor = torch.ones_like(values) if is_plain else (values + damping * mean) / largest

    def enter(x: Tensor) -> Tensor:
        return x if basis is None else _with_inner(x, basis.enter)

    def leave(x: Tensor) -> Tensor:
        return seen_from.leave(x if basis is None else _with_inner(x, basis.leave))

    def see(other: System) -> System:
        operator = other.operator * (1 / largest)
        return System(
            _Function(lambda x: enter(seen_from.enter(operator(leave(x.double()))))),
            enter(seen_from.enter(other.residual)) / largest,
            other.objective / largest,
            other.size / largest,
        )

    solution = conjugate_gradients(
        System(
            _bordered(inner, apart.border / largest),
            torch.where(seen, enter(seen_from.residual), 0) / largest,
            system.objective / largest,
            system.size / largest,
        ),
        limits,
        precondition=lambda r: torch.where(seen, r / divisor, 0),
        held_out=None if held_out is None else see(held_out),
        products=dtype,
        orthogonalize=is_plain and values.numel() * limits.iterations <= max_kept,
    )
    return restate(
        system,
        solution,
        correction=leave(solution.correction),
        trace=solution.trace.times(largest),
        kept={at: leave(kept) for at, kept in solution.kept.items()},
    )


@dataclass(frozen=True)
class _Function(Operator):
    """An operator that is given by what it does."""

    apply: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.apply(x)

    def __mul__(self, scale: float, /) -> "_Function":
        return _Function(lambda x: self.apply(x) * scale)

    def diagonal(self) -> Tensor:
        raise NotImplementedError


def _bordered(inner: Sequence[TruncatedProduct], border: Tensor) -> _Function:
    """`inner` on the unknowns but for the last row and column, and these multiplied."""

    def apply(x: Tensor) -> Tensor:
        image = x * border.to(x.dtype)
        for term in inner:
            image[:-1, :-1] += term(x[:-1, :-1])
        return image

    return _Function(apply)


def _rotate(
    term: TruncatedProduct,
    whole: TruncatedProduct,
    basis: KroneckerBasis,
    dtype: torch.dtype,
    stored: torch.dtype,
) -> TruncatedProduct:
    """A product of `inner` in a basis, of factors of trace one.

    As `KroneckerBasis.rotate` does, singular factors are raised by what rounding may have done.
    """
    assert basis.inputs is not None
    outputs, size_o = _turn_factor(term.outputs, basis.outputs, whole.outputs, dtype, stored)
    inputs, size_g = _turn_factor(term.inputs, basis.inputs, whole.inputs, dtype, stored)
    return TruncatedProduct(outputs, inputs, term.scale * size_o * size_g)


def _turn_factor(
    factor: Factor, q: Tensor, whole: Factor, dtype: torch.dtype, stored: torch.dtype
) -> tuple[Factor, float]:
    level = rounding_of(whole, stored)
    turned = turn(factor, q)
    if isinstance(turned, Truncated):
        size = turned.trace or 1.0
        unit = turned.raised(level) * (1 / size)
        return replace(unit, vectors=unit.vectors.to(dtype)), size
    size = trace_of(turned) or 1.0
    turned.diagonal().add_(level)
    return (turned / size).to(dtype), size


def _with_inner(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    changed = x.clone()
    changed[:-1, :-1] = change(x[:-1, :-1])
    return changed


def _kroneckers(apart: Apart) -> list[Kronecker]:
    return [
        Kronecker(dense_factor(t.outputs), dense_factor(t.inputs), t.scale) for t in apart.inner
    ]
