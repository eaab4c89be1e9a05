"""ACE-Merging: covariances made from centred task vectors, a prior, and a refined spectrum."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.methods.spectral import SpectralMethod

_TINY = 1e-12  # as published, in the logarithm of traces and where is divided by them


class AdaptiveCovariance(SpectralMethod):
    """Δ = (sum_m Δ̄_m (G_m + ε)) (sum_m (G_m + ε) + 1 cᵀ)^-1, and more where tasks differ in size.

    Δ̄_m is Δ_m less its mean over outputs, G_m = Δ̄_mᵀ Δ̄_m, and c the mean row of sum_m G_m. Tasks
    differ in size where the logarithms of |Δ_m|² have a variance of more than `heterogeneity` times
    the square of their mean. There G_m and ε are divided by the trace of G_m, c by the mean of
    |Δ_m|², and the leading directions of Δ + sum_m Δ_m (G_m - Ḡ), Ḡ the mean of all G_m + ε, are
    added with equal weight. Xu et al., 2026 (arXiv:2603.02945), as in their code.

    ε is absolute, and what all outputs of a task share is left out: a single model does not come
    back.
    """

    name = "ace"

    eps: float = Field(0.01, gt=0, description="added to the diagonal of each covariance")
    heterogeneity: float = Field(
        0.3, ge=0, description="of the sizes of task vectors, above which they are normalised"
    )
    refined: float = Field(
        0.3, ge=0, le=1, description="share of the directions that are then added"
    )

    @property
    def works_in_core_space(self) -> bool:
        return False  # means over outputs depend on their basis

    def merge_matrices(self, changes: Sequence[Tensor]) -> Tensor:
        sizes = torch.stack([change.square().sum() for change in changes])
        is_mixed = len(changes) > 1 and self._differ(sizes)
        num_inputs = changes[0].shape[1]
        identity = torch.eye(num_inputs, dtype=torch.float64, device=changes[0].device)
        plain, raised = torch.zeros_like(identity), torch.zeros_like(identity)  # sums over tasks
        numerator, spread = torch.zeros_like(changes[0]), torch.zeros_like(changes[0])
        for change in changes:
            centred = change - change.mean(0)
            moment = centred.mT @ centred
            trace = float(moment.trace()) + _TINY if is_mixed else 1.0
            moment /= trace
            plain += moment
            spread += change @ moment
            moment += (self.eps / trace) * identity
            raised += moment
            numerator += centred @ moment
        prior = plain.mean(0) / (float(sizes.mean()) + _TINY if is_mixed else 1.0)
        merged: Tensor = torch.linalg.solve(raised + prior, numerator, left=False)
        num_added = int(min(merged.shape) * self.refined)
        if not is_mixed or num_added == 0:
            return merged
        spread -= torch.stack(list(changes)).sum(0) @ (raised / len(changes))
        u, s, v = torch.linalg.svd(spread + merged, full_matrices=False)
        return merged.add_(s[:num_added].mean() * (u[:, :num_added] @ v[:num_added]))

    def _differ(self, sizes: Tensor) -> bool:
        logs = torch.log(sizes + _TINY)
        return bool(logs.var() > self.heterogeneity * (logs.mean().square() + _TINY))

    def tensor_bytes(self, shape: Sequence[int], num_models: int) -> int:
        matrices = 8 * shape[1] ** 2 if len(shape) == 2 else 0
        return super().tensor_bytes(shape, num_models) + matrices * torch.float64.itemsize
