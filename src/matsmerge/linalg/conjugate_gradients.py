"""Conjugate gradients from any start (Hestenes & Stiefel, 1952), with the care it needs.

    minimise f(X0 + D), D in the span of P_1, P_2, ...

Scalars and iterates are float64. The residual is recomputed from the iterate now and then, since
the recursion drifts away from it; the objective must fall, or the last iterate known to be good is
kept and the solver stops: with ill-conditioned factors, going on in spite of rounding is what lets
merged models decay after many iterations.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from matsmerge.linalg.kronecker_sums import (
    decompose_kronecker,
    kroneckers_of,
    nearest_kronecker,
)
from matsmerge.linalg.operators import Gram, Identity, Operator, Sum
from matsmerge.linalg.rounding import exceeds, relative_rounding, rounding_level
from matsmerge.linalg.system import Limits, Solution, Status, System, Trace, inner

_REFRESH_ITERATIONS = 20
# Of the objective, relative to that of the start: a rise that means nothing, and how far below
# zero rounding may put what is a sum of squares.
_RISE, _BELOW_ZERO = 1e-12, 1e-6
_PATIENCE = 10  # iterations without a better held-out objective
_EPS = torch.finfo(torch.float64).eps


Precondition = Callable[[Tensor], Tensor]


def conjugate_gradients(
    system: System,
    limits: Limits,
    *,
    precondition: Precondition = torch.clone,
    held_out: System | None = None,
    products: torch.dtype = torch.float64,
    orthogonalize: bool = False,
) -> Solution:
    """Solve by plain or preconditioned conjugate gradients; products A(P) in `products`.

    With a `held_out` system, the iterate with its lowest objective is the solution. Residuals of
    exact arithmetic are orthogonal to each other; to `orthogonalize` them, all are kept, and
    without a preconditioner the iterates then are those of exact arithmetic.
    """
    run = _Run(system, held_out, products)
    earlier = _Residuals(system.residual, limits.iterations) if orthogonalize else None
    kept: dict[int, Tensor] = {}
    status = Status.FINISHED
    r = system.residual.clone()
    p = precondition(r)
    rz = inner(r, p)
    run.note(r)
    while True:
        if run.done in limits.keep:
            kept[run.done] = run.d.clone()
        if rz == 0 or run.trace.residuals[-1] <= limits.tolerance or run.is_at_floor(r):
            status = Status.CONVERGED if run.done else Status.EXACT
            break
        if run.done == limits.iterations or (held_out and run.done - run.best_at >= _PATIENCE):
            break
        q = system.operator(p.to(products)).double()
        curvature = inner(p, q)
        if not (curvature > 0 and rz > 0):
            status = Status.FLOOR
            break
        run.largest = max(run.largest, curvature / inner(p, p))
        alpha = rz / curvature
        run.d.add_(p, alpha=alpha)
        if earlier is not None:
            earlier.add(r)
        r.sub_(q, alpha=alpha)
        if earlier is not None:
            earlier.remove_from(r)
        if system.objective_at(run.d, r) < -_BELOW_ZERO * system.objective:
            run.d.sub_(p, alpha=alpha)
            status = Status.FLOOR
            break
        run.done += 1
        has_drifted = False
        if run.done % _REFRESH_ITERATIONS == 0:
            fresh = run.recompute()
            has_drifted = float(fresh.norm()) > 2 * float(r.norm())
            r = fresh
            if not run.confirm(r):
                status = Status.FLOOR
                break
        z = precondition(r)
        previous, rz = rz, inner(r, z)
        # Directions that belong to a residual that was not there lead astray: begin anew.
        p.mul_(0.0 if has_drifted else rz / previous).add_(z)
        run.note(r)
    is_fresh = run.done % _REFRESH_ITERATIONS == 0 and status is not Status.FLOOR
    return run.finish(status, kept, limits.keep, r if is_fresh else run.recompute())


class _Residuals:
    """Residuals so far, each of length one."""

    def __init__(self, like: Tensor, most: int) -> None:
        self._rows = like.new_empty(most, like.numel(), dtype=torch.float64)
        self._num = 0

    def add(self, r: Tensor) -> None:
        flat = r.reshape(-1)
        norm = float(flat.norm())
        if norm > 0:
            self._rows[self._num] = flat / norm
            self._num += 1

    def remove_from(self, r: Tensor) -> None:
        rows = self._rows[: self._num]
        for _ in range(2):  # once leaves what rounding left of it
            r.sub_((rows.mT @ (rows @ r.reshape(-1))).view_as(r))


class _Run:
    """The iterate, the best one so far, and the record of both."""

    def __init__(self, system: System, held_out: System | None, products: torch.dtype) -> None:
        self.system = system
        self.held_out = held_out
        self.products = products
        self.d = torch.zeros_like(system.residual)
        self.done = 0
        self.trace = Trace()
        self.best = self.d.clone()  # of the held-out objective, or else known not to be worse
        self.best_at = 0
        self.largest = 0.0  # the largest eigenvalue seen so far
        self._confirmed = system.objective

    def is_at_floor(self, r: Tensor) -> bool:
        """Is the residual no larger than what rounding A(D) leaves of it?

        What is left then has no direction of the system in it, only those that no model has
        anything for, along which a step would be as long as it is meaningless.
        """
        return self.done > 0 and float(r.norm()) <= _EPS * self.largest * float(self.d.norm())

    def note(self, r: Tensor) -> None:
        """Record an iteration."""
        self.trace.residuals.append(self.system.relative(float(r.norm())))
        self.trace.objectives.append(self.system.objective_at(self.d, r))
        if self.held_out is not None:
            image = self.held_out.operator(self.d.to(self.products)).double()
            left = self.held_out.residual - image
            self.trace.held_out.append(self.held_out.objective_at(self.d, left))
            if self.trace.held_out[-1] < self.trace.held_out[self.best_at]:
                self.best, self.best_at = self.d.clone(), self.done

    def recompute(self) -> Tensor:
        """What the iterate really leaves of the residual."""
        return self.system.residual - self.system.operator(self.d)

    def confirm(self, r: Tensor) -> bool:
        """Has the objective not risen since it was last known for sure?"""
        objective = self.system.objective_at(self.d, r)
        if not objective <= self._confirmed + _RISE * self.system.objective:
            return False
        self._confirmed = objective
        if self.held_out is None:
            self.best, self.best_at = self.d.clone(), self.done
        return True

    def finish(
        self, status: Status, kept: dict[int, Tensor], keep: Sequence[int], r: Tensor
    ) -> Solution:
        """The solution: the last iterate if it is the best, or else the best one."""
        if self.held_out is not None:
            if self.best_at < self.done:
                status = Status.HELD_OUT
        elif self.done > self.best_at and not self.confirm(r):
            status = Status.FLOOR
        if self.best_at != self.done:
            self.d = self.best
            r = self.recompute()
        return Solution(
            self.d,
            status,
            self.system.relative(float(r.norm())),
            self.system.objective_at(self.d, r),
            self.best_at,
            self.trace,
            {at: kept[at] if at <= self.best_at and at in kept else self.d for at in keep},
        )


def jacobi(operator: Operator) -> Precondition:
    """Division by the operator's diagonal."""
    diagonal = operator.diagonal().double()
    inverse = torch.where(diagonal > 0, 1 / diagonal, 0)
    return lambda r: r * inverse


def solve_gram_by_iterations(
    system: System,
    limits: Limits,
    *,
    precondition: Precondition = torch.clone,
    held_out: System | None = None,
    stored: torch.dtype = torch.float32,
    orthogonalize: bool = False,
) -> Solution:
    """Conjugate gradients on a Gram system that is not worth an eigendecomposition.

    A singular matrix is raised by what rounding may have done to it, on the left of the system
    only, so that directions which only rounding has given it lead back to the start. Whether a
    matrix is singular is not looked at where it is known by its rows.
    """
    operator = system.operator
    if isinstance(operator, Gram):
        rounding = rounding_level(operator.matrix, stored)
        level = 0.0 if exceeds(operator.matrix, rounding) else float(rounding.max())
    else:
        residual = system.residual
        size = inner(residual, residual)
        largest = inner(residual, operator(residual)) / size if size > 0 else 0.0
        level = largest * relative_rounding(residual.shape[-1], stored)
    raised = replace(system, operator=operator + Identity(level))
    solution = conjugate_gradients(
        raised,
        limits,
        precondition=precondition,
        held_out=held_out,
        orthogonalize=orthogonalize,
    )
    return restate(system, solution)


def restate(system: System, solution: Solution, **changes: Any) -> Solution:
    """A solution with the residual and objective of the system as it was given."""
    solution = replace(solution, **changes)
    left = system.residual - system.operator(solution.correction)
    return replace(
        solution,
        residual=system.relative(float(left.norm())),
        objective=system.objective_at(solution.correction, left),
    )


def solve_kronecker_sum(
    system: System,
    limits: Limits,
    *,
    preconditioner: Literal["none", "jacobi", "kronecker"] = "kronecker",
    damping: float = 0.01,
    held_out: System | None = None,
    stored: torch.dtype = torch.float32,
    orthogonalize: bool = False,
) -> Solution:
    """Conjugate gradients on a sum of Kronecker products, preconditioned by the nearest one.

    Everything happens in the eigenbasis of the nearest product. There the preconditioner is a
    division by λ_O λ_G + damping * mean(λ_O λ_G), products may be taken in float32, and directions
    that no model has anything for are coordinates that stay zero. Iterates without a
    preconditioner are the same in every basis; their products are float64.
    """
    if not bool(system.residual.any()):
        return conjugate_gradients(system, replace(limits, iterations=0))
    terms = kroneckers_of(system.operator)
    largest = max(term.trace for term in terms)
    basis = decompose_kronecker(nearest_kronecker(terms), stored)
    seen = basis.values > 0
    products = torch.float32 if preconditioner == "kronecker" else torch.float64
    precondition: Precondition = torch.clone
    if preconditioner == "kronecker":
        damped = (basis.values + damping * basis.values.mean()) / largest
        precondition = lambda r: r / damped  # noqa: E731
    elif preconditioner == "jacobi":
        divide = jacobi(system.operator * (1 / largest))
        precondition = lambda r: basis.enter(divide(basis.leave(r)))  # noqa: E731

    def enter(outside: System) -> System:
        parts = kroneckers_of(outside.operator)
        return System(
            Sum(tuple(basis.rotate(part, 1 / largest, products, stored) for part in parts)),
            torch.where(seen, basis.enter(outside.residual), 0) / largest,
            outside.objective / largest,
            outside.size / largest,
        )

    solution = conjugate_gradients(
        enter(system),
        limits,
        precondition=lambda r: torch.where(seen, precondition(r), 0),
        held_out=None if held_out is None else enter(held_out),
        products=products,
        orthogonalize=orthogonalize,
    )
    return restate(
        system,
        solution,
        correction=basis.leave(solution.correction),
        trace=solution.trace.times(largest),
        kept={at: basis.leave(kept) for at, kept in solution.kept.items()},
    )
