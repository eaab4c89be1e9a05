"""The linear system of a merge, seen from where it starts.

    sum_m C_m(X) = sum_m C_m(W_m)          its solution minimises
    f(X) = 1/2 sum_m <X - W_m, C_m(X - W_m)>

With X = X0 + D it reads A(D) = R, A = sum_m C_m, R = sum_m C_m(W_m - X0). Nothing is lost by
cancellation in R, and equal models leave nothing to solve: R is exactly zero.

A layer of the merged model may receive other inputs z than it did in model m, z* = z + δ. What it
should output is what model m does for the same example, which is the same with inputs twice as
wide:

    X z - W z* = [X - W, -W] [z; δ]        R = sum_m Ĉ_m([W_m - X0, W_m]), its first half

with Ĉ_m of the moments of [z; δ], and C_m of those of z.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from matsmerge.linalg.joint_products import Gathered, is_joinable
from matsmerge.linalg.operators import Operator, Paired, TruncatedProduct


@dataclass(frozen=True)
class System:
    """A(D) = R."""

    operator: Operator  # A
    residual: Tensor  # R, float64
    objective: float  # f(X0)
    size: float  # the norm of sum_m C_m(W_m), which residuals are relative to

    def objective_at(self, correction: Tensor, residual: Tensor) -> float:
        """f(X0 + D), from D and what it leaves of the residual: f(X0) - <D, R0 + R> / 2."""
        return self.objective - 0.5 * (
            inner(correction, self.residual) + inner(correction, residual)
        )

    def relative(self, residual_norm: float) -> float:
        return residual_norm / self.size if self.size > 0 else residual_norm


def make_system(terms: Iterable[tuple[Operator, Tensor]], start: Tensor) -> System:
    """The system of covariances C_m and weights W_m, which are taken one at a time."""
    operator: Operator | None = None
    residual = torch.zeros_like(start, dtype=torch.float64)
    right = torch.zeros_like(residual)
    objective = 0.0
    gathered = Gathered(start)
    for given, weights in terms:
        difference = weights - start
        if isinstance(given, TruncatedProduct) and is_joinable(given):
            gathered.add(given, difference)
            operator = given if operator is None else operator + given
            continue
        if isinstance(given, Paired):
            covariance, both = given.own, torch.cat([difference, weights], dim=-1)
            image = given.both(both)
            change, energy = image[..., : start.shape[-1]], inner(both, image)
        else:
            covariance, change = given, given(difference)
            energy = inner(difference, change)
        # Only its size is wanted, for which float32 is enough once the covariance has size one.
        unit = float(covariance.diagonal().max()) or 1.0
        right.add_((covariance * (1 / unit))(weights.float()), alpha=unit)
        residual += change
        objective += 0.5 * energy
        operator = covariance if operator is None else operator + covariance
    joined = gathered.join()
    if joined is not None:
        joint, image, energy = joined
        residual += image
        objective += 0.5 * energy
        # sum_m C_m(W_m) = R + A(X0)
        right += image
        unit = joint.size or 1.0
        right.add_((joint * (1 / unit)).to(torch.float32)(start.float()), alpha=unit)
    assert operator is not None, "a system needs at least one term"
    return System(operator, residual, objective, float(right.norm()))


def inner(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.double().flatten(), b.double().flatten()))


class Status(Enum):
    """How a solution came about; the text says what to try next."""

    SOLVED = "solved in closed form"
    SINGULAR = (
        "solved as far as the statistics go; in directions that no model's data has, the start's "
        "values stay. More examples, a ridge or off_diagonal below 1 leave no such directions"
    )
    FINISHED = (
        "all iterations done; more of them lead further from the start, which may help or hurt: "
        "`mats tune` chooses the number by validation data"
    )
    CONVERGED = "converged; more iterations would change nothing that matters"
    FILTERED = "as far as the filter lets; more time or more directions lead further from the start"
    COMPUTED = "computed from the models' changes by another rule; no system was solved"
    EXACT = "the start is the solution already; nothing to do"
    HELD_OUT = (
        "stopped where the held-out objective was lowest; more examples allow more iterations"
    )
    FLOOR = (
        "as near to the solution as rounding allows; to come nearer use closed_form, a ridge, or "
        "statistics stored in float64"
    )


@dataclass(frozen=True)
class Limits:
    """When to stop, and which iterates to keep on the way."""

    iterations: int
    tolerance: float = 0.0  # of the relative residual
    keep: Sequence[int] = ()


@dataclass(frozen=True)
class Trace:
    """Each iteration's numbers; the first are those of the init."""

    residuals: list[float] = field(default_factory=list)  # relative
    objectives: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)  # objective of the held-out set

    def times(self, scale: float) -> "Trace":
        """The same of systems that are so many times larger."""
        return Trace(
            self.residuals,
            [value * scale for value in self.objectives],
            [value * scale for value in self.held_out],
        )


@dataclass(frozen=True)
class Solution:
    """What to add to the start, and how good that is."""

    correction: Tensor  # D
    status: Status
    residual: float  # |sum_m C_m(W_m - X)| / |sum_m C_m(W_m)|, recomputed
    objective: float  # f(X)
    iterations: int = 0
    trace: Trace = field(default_factory=Trace)
    kept: dict[int, Tensor] = field(default_factory=dict)  # corrections after these iterations


def rate(system: System, correction: Tensor, status: Status) -> Solution:
    """A correction with what it leaves of the system."""
    left = system.residual - system.operator(correction)
    return Solution(
        correction,
        status,
        system.relative(float(left.norm())),
        system.objective_at(correction, left),
    )
