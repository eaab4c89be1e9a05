"""TSV-M: the leading singular vectors of all task vectors, made orthogonal to each other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from matsmerge.methods.spectral import SpectralMethod, nearest_orthogonal, singular_triples


class TaskSingularVectors(SpectralMethod):
    """Δ = U⊥ S V⊥ᵀ of the concatenated leading singular triples of the task vectors.

    Of M task vectors (out, in) each gives min(out, in) / M triples; U⊥ and V⊥ are the nearest
    matrices with orthonormal columns, so that tasks do not interfere. Gargiulo et al., 2025
    (arXiv:2412.00081).
    """

    name = "tsv_m"

    def merge_matrices(self, changes: Sequence[Tensor]) -> Tensor:
        num_kept = min(changes[0].shape) // len(changes)
        if num_kept == 0:  # more models than directions
            return torch.stack(list(changes)).mean(0)
        parts = zip(*(singular_triples(change) for change in changes), strict=True)
        u, s, v = (torch.cat([own[..., :num_kept] for own in part], -1) for part in parts)
        return nearest_orthogonal(u) * s @ nearest_orthogonal(v).mT
