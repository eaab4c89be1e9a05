"""What methods share that merge matrices by their singular vectors."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Method
from matsmerge.methods.site import Grain, Site, total_weight

# Of a change of one hundredth of weights that were rounded to float32: what rounding adds to it.
_ROUNDING = 1e-5


class SpectralMethod(Method):
    """theta = theta_base + scale * (the task vectors, merged as matrices).

    Models that do not change a matrix have no part in it. Parameters that are no matrices get the
    mean of the task vectors.
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
            changing = [change for change in changes if change.any()]
            if not changing:
                return base
            change = self.merge_matrices(changing)
        else:
            change = torch.stack(changes).sum(0) / total_weight(site.tasks)
        return base.add_(change, alpha=self.scale)

    @abstractmethod
    def merge_matrices(self, changes: Sequence[Tensor]) -> Tensor:
        """The merged change of a weight from its task vectors, (out, in) each."""


def singular_triples(matrix: Tensor, size: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The singular triples (out, k), (k,), (in, k) of a matrix (out, in) of rank k.

    A change with fewer directions than its shape allows, as of a LoRA, goes without the others:
    their singular vectors could be any. `size` is the norm of what rounding is relative to, by
    default that of the matrix.
    """
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((s > _ROUNDING * (float(matrix.norm()) if size is None else size)).sum())
    return u[:, :rank], s[:rank], v[:rank].mT


def nearest_orthogonal(matrix: Tensor) -> Tensor:  # (d, k), k <= d
    """The matrix with orthonormal columns that is nearest to one: P Qᵀ of its SVD P S Qᵀ."""
    p, _, q = torch.linalg.svd(matrix, full_matrices=False)
    nearest: Tensor = p @ q
    return nearest
