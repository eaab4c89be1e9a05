"""What methods share that add up task vectors after dropping some of their entries."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Measuring, Method, Pass
from matsmerge.methods.sign_election import merge_agreeing
from matsmerge.methods.site import (
    Measured,
    Site,
    SiteTask,
    scratch,
    stack_deltas,
    total_weight,
)


class ThinnedMethod(Method):
    """theta = theta_base + scale * sum_m w_m d_m, d_m task vectors of which some entries are left.

    With `rescale` each d_m is multiplied so that its magnitudes add up to what those of the whole
    task vector do, within a parameter. Methods that elect add up what agrees in sign.
    """

    needs_base = True
    elects: ClassVar[bool] = False

    scale: float = Field(1.0, description="factor on the merged task vector, the papers' lambda")
    density: float = Field(1.0, gt=0, le=1, description="share of each task vector's entries kept")
    rescale: bool = Field(False, description="scale what is kept to the sum of magnitudes before")
    normalize: bool = Field(False, description="divide the sum by the sum of the models' weights")

    @abstractmethod
    def thin_(self, site: Site, deltas: Tensor, own: slice) -> None:
        """Set entries of task vectors, (models, elements), to zero; `own` is where the site is."""

    def row_length(self, site: Site) -> int:  # noqa: ARG002
        """How long the rows are of which `thin_` has to see all, beyond the site."""
        return 1

    def load(self, site: Site) -> tuple[Tensor, Tensor, slice]:
        """The base and all task vectors in the rows of a site, and where it is in them."""
        rows, own = site.whole_rows(self.row_length(site))
        base = rows.load_base()
        return base, stack_deltas(rows, base), own

    def choose(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:  # noqa: ARG002
        """Learn what `thin_` has to know beyond a site; it is not asked where all is kept."""
        return {}
        yield

    @property
    def measured_over(self) -> Literal["parameter", "model"] | None:
        return "parameter"

    @property
    def divides_by_weights(self) -> bool:
        return self.normalize and not self.elects

    @property
    def may_add_nothing(self) -> bool:
        return True

    def measure(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:
        if all(task.density == 1 for task in tasks):
            return {}
        measured = dict((yield from self.choose(tasks, num_elements)))
        if self.rescale:
            before, after = np.sum((yield Pass(_Sizes(self, measured))), axis=0)
            factors = np.divide(before, after, out=np.ones_like(before), where=after > 0)
            measured["factors"] = factors.tolist()
        return measured

    def merge(self, site: Site) -> Tensor:
        base, deltas, own = self.load(site)
        self.thin_(site, deltas, own)
        base, deltas = base[own], deltas[:, own]
        weights = [task.weight for task in site.tasks]
        if "factors" in site.measured:
            deltas.mul_(deltas.new_tensor(site.measured["factors"])[:, None])
        if self.elects:
            merged = merge_agreeing(deltas, weights, normalize=self.normalize)
        else:
            merged = deltas.new_tensor(weights) @ deltas
            if self.normalize:
                merged.div_(total_weight(site.tasks))
        return base.add_(merged, alpha=self.scale)


@dataclass(frozen=True)
class _Sizes:
    """Sums of magnitudes of all task vectors, before and after thinning."""

    method: ThinnedMethod
    measured: Measured

    def __call__(self, site: Site) -> list[list[float]]:  # (2, models)
        _, deltas, own = self.method.load(site)
        before = _sizes(deltas[:, own])
        self.method.thin_(replace(site, measured=self.measured), deltas, own)
        return [before, _sizes(deltas[:, own])]


def _sizes(deltas: Tensor) -> list[float]:  # (models,)
    """Sums of magnitudes in float64; a row at a time, as a `dtype` for the sum takes longer."""
    row = scratch("row", (deltas.shape[1],), deltas.new_empty(0, dtype=torch.float64))
    return [float(row.copy_(delta).abs_().sum()) for delta in deltas]
