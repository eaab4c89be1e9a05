"""NuSLERP: spherical interpolation of weights or task vectors, whole or vector by vector."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.methods.site import Grain, Site, total_weight
from matsmerge.methods.spherical import Matrix, OptionalBase, arc, cosine_of

_PARALLEL = 1e-16  # sine squared below which the arc is a line


class NuSlerp(OptionalBase):
    """As `slerp`, also of task vectors, and also for each row or column by itself.

    Without `nuslerp_flatten` the angle is that of vectors along the last dimension of a parameter,
    with `nuslerp_row_wise` along its first. Nearly parallel vectors, which `slerp` adds up
    linearly, lie on an arc here. mergekit's method of that name.
    """

    name = "nuslerp"
    num_models = 2

    nuslerp_flatten: bool = Field(True, description="one angle for a whole parameter")
    nuslerp_row_wise: bool = Field(
        False, description="vectors along the first dimension, not the last; without flattening"
    )

    @property
    def grain(self) -> Grain:  # type: ignore[override]  # of the class, for all other methods
        return Grain.STRETCH if self.nuslerp_flatten else Grain.TENSOR

    @property
    def measured_over(self) -> Literal["parameter"] | None:
        return "parameter" if self.nuslerp_flatten else None

    @property
    def divides_by_weights(self) -> bool:
        return True

    @property
    def works_on_changes(self) -> bool:
        return self.task_vectors and self.nuslerp_flatten

    def mix(self, gram: Matrix, weights: Sequence[float]) -> Sequence[float]:
        cosine, t = cosine_of(gram), weights[1] / sum(weights)
        return (1 - t, t) if 1 - cosine**2 <= _PARALLEL else arc(cosine, t)

    def merge(self, site: Site) -> Tensor:
        if self.nuslerp_flatten:
            return super().merge(site)
        shape = site.shape or (1,)
        base = site.load_base().double().view(shape) if self.task_vectors else None
        first, second = (task.load().double().view(shape) for task in site.tasks)
        if base is not None:
            first, second = first.sub_(base), second.sub_(base)
        t = site.tasks[1].weight / total_weight(site.tasks)
        merged = _between(first, second, t, 0 if self.nuslerp_row_wise else -1)
        return merged if base is None else merged.add_(base)


def _between(first: Tensor, second: Tensor, t: float, dim: int) -> Tensor:
    """The points at t on the arcs between vectors along a dimension."""
    norms = first.norm(dim=dim, keepdim=True) * second.norm(dim=dim, keepdim=True)
    product = (first * second).sum(dim, keepdim=True)
    cosine = torch.where(norms > 0, product / norms.masked_fill(norms == 0, 1), 0).clamp_(-1, 1)
    is_line = 1 - cosine.square() <= _PARALLEL
    angle = cosine.masked_fill(is_line, 0).acos_()
    a, b = torch.sin((1 - t) * angle) / angle.sin(), torch.sin(t * angle) / angle.sin()
    return torch.where(is_line, 1 - t, a) * first + torch.where(is_line, t, b) * second
