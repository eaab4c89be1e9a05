"""Weighted averaging of parameters."""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Method
from matsmerge.methods.site import Site, scratch, total_weight


class Average(Method):
    """theta = sum_m w_m theta_m / sum_m w_m.

    Model soups (Wortsman et al., 2022), federated averaging (McMahan et al., 2017).
    """

    name = "average"

    normalize: bool = Field(True, description="divide by the sum of the models' weights")

    @property
    def divides_by_weights(self) -> bool:
        return self.normalize

    @property
    def works_on_changes(self) -> bool:
        return self.normalize

    def coefficients(self, weights: Sequence[float]) -> list[float] | None:
        return [weight / sum(weights) for weight in weights] if self.normalize else None

    def merge(self, site: Site) -> Tensor:
        first, *others = site.tasks
        result = first.load().mul_(first.weight)
        values = scratch("values", result.shape, result)
        for task in others:
            result.add_(task.load(out=values), alpha=task.weight)
        return result.div_(total_weight(site.tasks)) if self.normalize else result
