"""What rounding does to second moments that are stored in few digits."""

import math

import torch
from torch import Tensor

_NEXT_TO_NOTHING = -1e-3


def rounding_level(matrix: Tensor, dtype: torch.dtype) -> Tensor:  # (..., d, d) -> (...)
    """How far rounding a symmetric matrix's entries to `dtype` may move an eigenvalue.

    Each entry is off by some eps/4 of itself. Errors of either sign in d² entries, e each, have a
    spectral norm of about 2 e sqrt(d), here eps |A|_F / (2 sqrt(d)); eight times that is allowed,
    since sums of rows were rounded as well. Decomposing in float64 adds a little of its own.
    """
    level: Tensor = torch.linalg.matrix_norm(matrix.double())
    return level.mul_(relative_rounding(matrix.shape[-1], dtype))


def relative_rounding(d: int, dtype: torch.dtype) -> float:
    """The level of rounding of a matrix (d, d) whose norm is one."""
    return float(4 * torch.finfo(dtype).eps / d**0.5 + d * torch.finfo(torch.float64).eps)


def is_regular(moment: Tensor) -> bool:
    """Did `without_rounding` find no direction that only rounding has given it?"""
    return moment.ndim == 1 or moment.dtype == torch.float32


def may_be_second_moment(lowest: float, stored: torch.dtype) -> bool:
    """Is this lowest eigenvalue, relative to the largest, one that a second moment may have?

    It has none below zero but for rounding: at most `rounding_level` of a matrix whose eigenvalues
    are all the same. What is lower, and not next to nothing, is damage.
    """
    return lowest >= min(_NEXT_TO_NOTHING, -4 * torch.finfo(stored).eps)


def to_unit_size(moment: Tensor) -> tuple[Tensor, float]:  # (..., d, d), or a diagonal (d,)
    """A second moment in float64 with entries of at most one, and what it was divided by.

    That is a power of two, so nothing is rounded. Second moments of gradients or of unusual
    activations may be of sizes that float32 does not have once they are multiplied.
    """
    size = 2.0 ** math.frexp(float(moment.abs().max()))[1]
    return moment.double() / size, size


def without_rounding(
    moment: Tensor, stored: torch.dtype, ridge: Tensor | float = 0.0
) -> Tensor:  # (..., d, d) and (...), or a diagonal (d,)
    """A second moment without the directions that only rounding has given it, plus a ridge.

    Rounding turns the zero eigenvalues of a singular moment into small ones of either sign. Solvers
    would move parameters along such directions, although no data has them. A moment that is
    regular beyond its rounding is returned in float32, any other in float64: rounded once more, it
    would have such directions again.
    """
    ridge = torch.as_tensor(ridge, dtype=torch.float64).to(moment.device).unsqueeze(-1)
    if moment.ndim == 1:
        return moment.double().add(ridge)
    level = rounding_level(moment, max((stored, torch.float32), key=_coarseness))
    regular = moment.to(torch.float64, copy=True)
    regular.diagonal(dim1=-2, dim2=-1).add_(ridge)
    if exceeds(regular, level):
        return regular.float()
    values, vectors = torch.linalg.eigh(moment.double())
    roots = (torch.where(values > level.unsqueeze(-1), values, 0) + ridge).sqrt()
    half: Tensor = vectors * roots.unsqueeze(-2)
    return half @ half.mT


def exceeds(matrix: Tensor, level: Tensor) -> bool:  # (..., d, d) and (...)
    """Are all eigenvalues of a symmetric matrix larger than the level? Told by Cholesky."""
    lowered = matrix.to(torch.float64, copy=True)
    lowered.diagonal(dim1=-2, dim2=-1).sub_(level.unsqueeze(-1))
    return bool((torch.linalg.cholesky_ex(lowered).info == 0).all())


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
