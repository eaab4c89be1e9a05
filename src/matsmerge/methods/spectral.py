"""What methods share that merge matrices by their singular vectors."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Method
from matsmerge.methods.site import Grain, Site, total_weight


class SpectralMethod(Method):
    """theta = theta_base + scale * (the task vectors, merged as matrices).

    Parameters that are no matrices get the mean of the task vectors.
    """

    grain = Grain.TENSOR
    needs_base = True

    scale: float = Field(1.0, description="factor on the merged task vector, the papers' alpha")

    @property
    def divides_by_weights(self) -> bool:
        return True

    @property
    def works_on_changes(self) -> bool:
        return False  # how many directions there are depends on the shape of the weight

    @property
    def works_in_core_space(self) -> bool:
        return True  # where there are as many as the adapters have

    def merge(self, site: Site) -> Tensor:
        base = site.load_base().double().view(site.shape)
        changes = [
            task.load().double().view(site.shape).sub_(base).mul_(task.weight)
            for task in site.tasks
        ]
        if base.ndim == 2:
            change = self.merge_matrices(changes)
        else:
            change = torch.stack(changes).sum(0) / total_weight(site.tasks)
        return base.add_(change, alpha=self.scale)

    @abstractmethod
    def merge_matrices(self, changes: Sequence[Tensor]) -> Tensor:
        """The merged change of a weight from its task vectors, (out, in) each."""


def nearest_orthogonal(matrix: Tensor) -> Tensor:  # (d, k), k <= d
    """The matrix with orthonormal columns that is nearest to one: P Qᵀ of its SVD P S Qᵀ."""
    p, _, q = torch.linalg.svd(matrix, full_matrices=False)
    nearest: Tensor = p @ q
    return nearest
