"""Iso-CTS: directions that tasks share and directions of single tasks, all with equal weight."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.methods.spectral import SpectralMethod, nearest_orthogonal, singular_triples


class IsotropicCommonAndSpecific(SpectralMethod):
    """Δ = mean(s) U⊥ V⊥ᵀ of the sum's leading triples and of each task's leading others.

    A task's others are the singular triples of its task vector outside the span of the common left
    vectors; U⊥ and V⊥ are the nearest matrices with orthonormal columns. Marczak et al., 2025
    (arXiv:2502.04959).
    """

    name = "iso_cts"
    is_isotropic = True

    common: float = Field(0.8, ge=0, le=1, description="share of the directions that are common")

    def merge_matrices(self, changes: Sequence[Tensor]) -> Tensor:
        num, num_tasks = min(changes[0].shape), len(changes)
        # What is not common is divided evenly among tasks.
        num_own = min(round((num - int(num * self.common)) / num_tasks), num // num_tasks)
        num_common = num - num_own * num_tasks
        common = singular_triples(torch.stack(list(changes)).sum(0))
        parts = [tuple(part[..., :num_common] for part in common)]
        u = parts[0][0]
        for change in changes:
            own = singular_triples(change - u @ (u.mT @ change), float(change.norm()))
            parts.append(tuple(part[..., :num_own] for part in own))
        left, sizes, right = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        mean = sizes.sum() / max(1, len(sizes))
        return mean * nearest_orthogonal(left) @ nearest_orthogonal(right).mT
