"""Solutions without iterations, where the covariances allow it."""

import torch
from torch import Tensor

from matsmerge.linalg.eigenbasis import Decompose, decompose, dense, solve_by_filter
from matsmerge.linalg.rounding import rounding_level
from matsmerge.linalg.system import Solution, Status, System, rate

_POWER_STEPS = 8


def solve_diagonal(system: System) -> Solution:
    """Division; what no model has anything for stays as it is."""
    diagonal = system.operator.diagonal().double()
    correction = torch.where(diagonal > 0, system.residual / diagonal, 0)
    status = Status.SOLVED if bool((diagonal > 0).all()) else Status.SINGULAR
    return rate(system, correction, status)


def solve_gram(
    system: System,
    *,
    ridge: float = 0.0,
    stored: torch.dtype = torch.float32,
    decomposed: Decompose = decompose,
) -> Solution:
    """(A + ridge) D = R by Cholesky in float64, or by the pseudo-inverse where A is singular.

    Singular is what rounding the statistics could have made: dividing by such eigenvalues is what
    spoils RegMean in float32.
    """
    matrix = dense(system.operator).double()
    regular = matrix.clone()
    regular.diagonal(dim1=-2, dim2=-1).add_(ridge)
    factor, info = torch.linalg.cholesky_ex(regular)
    is_regular = bool((info == 0).all())
    if is_regular and bool((_lowest(factor) > rounding_level(matrix, stored)).all()):
        correction = torch.cholesky_solve(system.residual.mT, factor).mT
        return rate(system, correction, Status.SOLVED)
    return solve_by_filter(system, decomposed(matrix, stored), ridge)


def solve_gram_in_float32(system: System, start: Tensor) -> Solution:
    """X A = B with the inverse of A in float32, as RegMean's own code has it.

    B = X0 A + R is what the models ask for, from no start. What rounding does to an ill-conditioned
    A is the point: the paper explains by it why conjugate gradients give better merges.
    """
    right = (system.operator(start) + system.residual).float()
    inverse, info = torch.linalg.inv_ex(dense(system.operator).float())
    if bool((info != 0).any()):
        return rate(system, torch.zeros_like(start), Status.SINGULAR)
    return rate(system, (right @ inverse).double() - start, Status.SOLVED)


def _lowest(factor: Tensor) -> Tensor:  # (..., d, d) -> (...)
    """About the lowest eigenvalue of L Lᵀ, from a few steps of inverse iteration."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*factor.shape[:-1], 1, generator=generator, dtype=torch.float64)
    x = x.to(factor.device)
    for _ in range(_POWER_STEPS):
        x = torch.cholesky_solve(x / x.norm(dim=-2, keepdim=True), factor)
    size: Tensor = x.norm(dim=-2)[..., 0]
    return size.reciprocal()
