"""Singular values of a merged change, calibrated to the changes it was merged from.

    Δ = U S Vᵀ,   s_rm = <u_rᵀ Δ, u_rᵀ Δ_m> / |u_rᵀ Δ_m|²,   S_r / mean_m max(s_rm, least)

s_rm is how much of what model m does along the output direction u_r the merged change does. Several
models that share a direction add up in it, s_rm > 1, and drown directions of single models.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def calibrate(change: Tensor, changes: Iterable[Tensor], least: float = 1.0) -> Tensor:
    """What to add to a change (out, in) to have its singular values calibrated.

    `least` is in units of one over the number of changes; directions in which a model changes
    nothing count with it.
    """
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    merged = s[:, None] * v
    coefficients = []
    for other in changes:
        response = u.mT @ other
        size = response.square().sum(1)
        # Below this a response is what rounding left of an orthogonal direction.
        rounding = torch.finfo(size.dtype).eps * other.norm()
        is_seen = size > rounding.square()
        coefficients.append(torch.where(is_seen, (merged * response).sum(1) / size, 0))
    stacked = torch.stack(coefficients)  # (models, directions)
    factors = 1 / stacked.clamp(min=least / len(stacked)).mean(0)
    # The factors less one, so that what is calibrated already stays as it is.
    correction: Tensor = u * (s * (factors - 1)) @ v
    return correction
