"""What methods share that add up task vectors after dropping some of their entries."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Measuring, Method, Pass
from matsmerge.methods.sign_election import merge_agreeing
from matsmerge.methods.site import Measured, Site, Task, total_weight


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
    def thin(self, site: Site) -> tuple[Tensor, Tensor]:
        """The base at a site, and the thinned task vectors, (models, elements)."""

    def choose(self, tasks: Sequence[Task], num_elements: int) -> Measuring:  # noqa: ARG002
        """Learn what `thin` has to know beyond a site; it is not asked where all is kept."""
        return {}
        yield

    @property
    def measured_over(self) -> Literal["parameter", "model"] | None:
        return "parameter"

    @property
    def divides_by_weights(self) -> bool:
        return self.normalize and not self.elects

    def measure(self, tasks: Sequence[Task], num_elements: int) -> Measuring:
        if all(task.density == 1 for task in tasks):
            return {}
        measured = dict((yield from self.choose(tasks, num_elements)))
        if self.rescale:
            before, after = np.sum((yield Pass(_Sizes(self, measured))), axis=0)
            factors = np.divide(before, after, out=np.ones_like(before), where=after > 0)
            measured["factors"] = factors.tolist()
        return measured

    def merge(self, site: Site) -> Tensor:
        base, deltas = self.thin(site)
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

    def __call__(self, site: Site) -> NDArray[np.float64]:  # (2, models)
        after = self.method.thin(replace(site, measured=self.measured))[1]
        kept = after.double().abs().sum(1).tolist()
        base = site.load_base()
        before = [float(task.load().sub_(base).double().abs().sum()) for task in site.tasks]
        return np.array([before, kept])
