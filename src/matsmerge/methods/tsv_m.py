"""TSV-M: the leading singular vectors of all task vectors, made orthogonal to each other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from matsmerge.methods.spectral import SpectralMethod, nearest_orthogonal


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
        u, s, v = zip(*(_leading(change, num_kept) for change in changes), strict=True)
        left, right = nearest_orthogonal(torch.cat(u, 1)), nearest_orthogonal(torch.cat(v, 1))
        return left * torch.cat(s) @ right.mT


def _leading(change: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """The leading singular triples: (out, num), (num,), (in, num)."""
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    return u[:, :num], s[:num], v[:num].mT
