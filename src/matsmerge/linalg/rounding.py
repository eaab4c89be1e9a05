"""What rounding does to second moments that are stored in few digits."""

import torch
from torch import Tensor


def rounding_level(matrix: Tensor, dtype: torch.dtype) -> Tensor:  # (..., d, d) -> (...)
    """How far rounding a symmetric matrix's entries to `dtype` may move an eigenvalue.

    Each entry is off by some eps/4 of itself. Errors of either sign in d² entries, e each, have a
    spectral norm of about 2 e sqrt(d), here eps |A|_F / (2 sqrt(d)); eight times that is allowed,
    since sums of rows were rounded as well. Decomposing in float64 adds a little of its own.
    """
    d = matrix.shape[-1]
    level: Tensor = torch.linalg.matrix_norm(matrix.double())
    return level.mul_(4 * torch.finfo(dtype).eps / d**0.5 + d * torch.finfo(torch.float64).eps)


def lowest_by_rounding(dtype: torch.dtype) -> float:
    """The lowest eigenvalue, relative to the largest, that rounding to `dtype` explains.

    At most `rounding_level` of a matrix whose eigenvalues are all the same.
    """
    return -4 * torch.finfo(dtype).eps


def without_negative(factor: Tensor, stored: torch.dtype) -> Tensor:  # (..., d, d) or (d,)
    """A factor in float32, its diagonal raised by what rounding may have taken off eigenvalues.

    Rounding makes some eigenvalues of a singular factor negative, and those of its products with
    others: conjugate gradients would walk down such directions for ever.
    """
    raised = factor.float() if factor.dtype != torch.float32 else factor.clone()
    if factor.ndim > 1:
        coarser = max((stored, torch.float32), key=lambda dtype: torch.finfo(dtype).eps)
        level = rounding_level(factor, coarser) / 2
        raised.diagonal(dim1=-2, dim2=-1).add_(level.unsqueeze(-1).float())
    return raised
