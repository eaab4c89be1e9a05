"""A Gram system in the eigenbasis of its matrix: filters, and every iterate of CG at once.

    A = Q Λ Qᵀ,  R̃ = R Q,  D = (R̃ * s(λ)) Qᵀ

A filter s(λ) is 1/λ for the pseudo-inverse, 1/(λ + ε) for a ridge. The j-th iterate of conjugate
gradients on the whole matrix is one too: its scalars are those of CG on the diagonal Λ with the
right-hand side g_i = |R̃[:, i]|, a vector of length `in`. So one eigendecomposition and a CG on
vectors give all iterates, at one matrix product for each that is kept.

Vectors are small enough to keep all residuals orthogonal to each other, as they are in exact
arithmetic. Without that even float64 is tens of percent off the true iterates after some twenty
iterations on the Gram matrices of real activations, and differently so on every machine.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from matsmerge.linalg.operators import Gram, LowRank, Operator, Sum
from matsmerge.linalg.rounding import rounding_level
from matsmerge.linalg.system import Limits, Solution, Status, System, Trace, inner


@dataclass(frozen=True)
class Eigenbasis:
    """A symmetric matrix's eigenvectors, and its eigenvalues without what is only rounding."""

    values: Tensor  # (in,) or (groups, in), float64; 0 where no larger than rounding
    vectors: Tensor  # (in, in) or (groups, in, in), float64
    lowest: float  # eigenvalue as computed, relative to the largest
    rounding: Tensor  # () or (groups,), the largest that rounding the matrix explains

    @property
    def num_null(self) -> int:
        return int((self.values == 0).sum())


def decompose(matrix: Tensor, stored: torch.dtype = torch.float32) -> Eigenbasis:
    """Eigenvalues and vectors in float64 of a matrix that was stored in another precision."""
    level = rounding_level(matrix, stored)
    values, vectors = torch.linalg.eigh(matrix.double())
    largest = values.amax(-1).clamp(min=torch.finfo(torch.float64).tiny)
    lowest = float((values.amin(-1) / largest).min())
    seen = values > level.unsqueeze(-1)
    return Eigenbasis(torch.where(seen, values, 0), vectors, lowest, level)


def solve_by_filter(system: System, basis: Eigenbasis, ridge: float = 0.0) -> Solution:
    """The solution nearest to the start; with a ridge, (A + ridge) D = R.

    A ridge below what is only rounding changes nothing.
    """
    rotated = system.residual @ basis.vectors
    values = basis.values.unsqueeze(-2)
    regular = values + ridge
    seen = regular > basis.rounding[..., None, None]
    filtered = torch.where(seen, rotated / regular, 0)
    left = rotated - filtered * values
    status = Status.SOLVED if bool(seen.all()) else Status.SINGULAR
    return Solution(
        filtered @ basis.vectors.mT,
        status,
        system.relative(float(left.norm())),
        system.objective - 0.5 * (inner(filtered, rotated) + inner(filtered, left)),
    )


def solve_by_flow(system: System, basis: Eigenbasis, time: float, share: float) -> Solution:
    """Where gradient flow, D' = R - A(D), is after a time, in the leading directions alone.

    A filter as well: s(λ) = (1 - exp(-λ time)) / λ for the largest eigenvalues, of which there are
    `share` of all, rounded up; 0 for the others.
    """
    rotated = system.residual @ basis.vectors
    values = basis.values.unsqueeze(-2)
    num = values.shape[-1]
    # Less a little: 0.65 * 20 is more than 13 in binary.
    num_kept = max(1, math.ceil(share * num - 1e-9))
    flow = torch.where(values > 0, -torch.expm1(-values * time) / values, 0)
    flow[..., : num - num_kept] = 0  # eigenvalues are in ascending order
    filtered = rotated * flow
    left = rotated - filtered * values
    return Solution(
        filtered @ basis.vectors.mT,
        Status.FILTERED,
        system.relative(float(left.norm())),
        system.objective - 0.5 * (inner(filtered, rotated) + inner(filtered, left)),
    )


@dataclass(frozen=True)
class _HeldOut:
    """Another system's objective for D = (U * x) Qᵀ: f' - <x, slope> + 1/2 xᵀ curvature x."""

    objective: float
    slope: Tensor  # (..., in)
    curvature: Tensor  # (..., in, in)

    def __call__(self, x: Tensor) -> float:
        quadratic = (x.unsqueeze(-2) @ self.curvature @ x.unsqueeze(-1)).sum()
        return self.objective - inner(x, self.slope) + 0.5 * float(quadratic)


def _see_held_out(held_out: System, units: Tensor, basis: Eigenbasis) -> _HeldOut:
    q = basis.vectors
    matrix = dense(held_out.operator).double()
    return _HeldOut(
        held_out.objective,
        (units * (held_out.residual @ q)).sum(-2),
        (units.mT @ units) * (q.mT @ matrix @ q),
    )


def dense(operator: Operator) -> Tensor:
    """The matrix of a Gram, of a sum of low ranks, or of both."""
    if isinstance(operator, Gram):
        return operator.matrix
    if isinstance(operator, LowRank):
        return operator.dense().matrix
    assert isinstance(operator, Sum)
    first, *others = map(dense, operator.terms)
    for other in others:
        first = first + other
    return first


def is_gram(operator: Operator) -> bool:
    """Is it X times some matrix?"""
    if isinstance(operator, Sum):
        return all(map(is_gram, operator.terms))
    return isinstance(operator, (Gram, LowRank))


def follow_trajectory(
    system: System, basis: Eigenbasis, limits: Limits, held_out: System | None = None
) -> Solution:
    """Conjugate gradients on a Gram system, in its eigenbasis.

    With a `held_out` system, the iterate with its lowest objective is the solution. Those to keep
    on the way are turned back in float32.
    """
    rotated = system.residual @ basis.vectors
    g = rotated.norm(dim=-2)
    # Outside the range of A nothing can be done; what is there is kept out of the recursion.
    values = basis.values
    g, lost = torch.where(values > 0, g, 0), g[values == 0].norm()
    units = torch.where(g > 0, 1 / g, 0).unsqueeze(-2) * rotated
    look = None if held_out is None else _see_held_out(held_out, units, basis)

    trace = Trace()
    kept: dict[int, Tensor] = {}
    best = x = torch.zeros_like(g)
    r, p, rr = g, g, inner(g, g)
    past = torch.empty(0, g.numel(), dtype=g.dtype, device=g.device)
    status, done, best_at = Status.FINISHED, 0, 0
    floor = rr * torch.finfo(g.dtype).eps ** 2
    while True:
        left = (g - values * x).norm()  # the recursion's own r goes on falling for ever
        trace.residuals.append(system.relative(float(torch.hypot(left, lost))))
        trace.objectives.append(system.objective - inner(x, g) + 0.5 * inner(x, values * x))
        if look is not None:
            trace.held_out.append(look(x))
            if trace.held_out[-1] < trace.held_out[best_at]:
                best, best_at = x, done
        if done in limits.keep:
            kept[done] = x
        if rr <= floor or trace.residuals[-1] <= limits.tolerance:
            status = Status.CONVERGED if done else Status.EXACT
            break
        if done == limits.iterations:
            break
        if done == len(past):
            past = torch.cat([past, past.new_empty(max(64, done), past.shape[1])])
        past[done] = (r / rr**0.5).flatten()
        q = values * p
        alpha = rr / inner(p, q)
        x, r = x + alpha * p, r - alpha * q
        for _ in range(2):
            seen = past[: done + 1]
            r = r - ((seen @ r.flatten()) @ seen).view_as(r)
        previous, rr = rr, inner(r, r)
        p = r + (rr / previous) * p
        done += 1
    if look is None:
        best, best_at = x, done
    elif best_at < done:
        status = Status.HELD_OUT

    final = (units * best.unsqueeze(-2)) @ basis.vectors.mT
    units, back = units.float(), basis.vectors.mT.float()

    def correction(x: Tensor) -> Tensor:
        return ((units * x.float().unsqueeze(-2)) @ back).double()

    return Solution(
        final,
        status,
        trace.residuals[best_at],
        trace.objectives[best_at],
        best_at,
        trace,
        {at: correction(kept[at]) if at in kept and at < best_at else final for at in limits.keep},
    )


# What an eigendecomposition costs in products of the matrix with itself (measured: 9 to 14).
_EIGH_PRODUCTS = 12
# Its iterates are exact, so it may cost this many times what plain conjugate gradients do.
_WORTH = 4


def is_worth_it(
    num_outputs: int, num_inputs: int, iterations: int, num_kept: int, num_sharing: int = 1
) -> bool:
    """Should iterates come from the eigenbasis rather than plain CG? Compared in products X A.

    It never pays for a few rows, such as a vector's, and always for square layers.
    """
    decomposing = _EIGH_PRODUCTS * num_inputs / num_sharing
    applying = (3 + num_kept) * num_outputs
    return decomposing + applying < _WORTH * (iterations + 1) * num_outputs


Decompose = Callable[[Tensor, torch.dtype], Eigenbasis]
