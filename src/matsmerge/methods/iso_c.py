"""Iso-C: the sum of the task vectors with all singular values the same."""

from collections.abc import Sequence

import torch
from torch import Tensor

from matsmerge.methods.spectral import SpectralMethod, singular_triples


class IsotropicCommon(SpectralMethod):
    """Δ = mean(s) U Vᵀ, where U S Vᵀ is the sum of the task vectors.

    No direction that several tasks share drowns those of single tasks. Marczak et al., 2025
    (arXiv:2502.04959).
    """

    name = "iso_c"
    is_isotropic = True

    def merge_matrices(self, changes: Sequence[Tensor]) -> Tensor:
        u, s, v = singular_triples(torch.stack(list(changes)).sum(0))
        return s.sum() / max(1, len(s)) * (u @ v.mT)
