"""Task arithmetic: adding up task vectors."""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Method
from matsmerge.methods.site import Site, add_models


class TaskArithmetic(Method):
    """theta = theta_base + scale * sum_m w_m (theta_m - theta_base).

    Ilharco et al., 2023 (arXiv:2212.04089); `scale` is their lambda.
    """

    name = "task_arithmetic"
    needs_base = True

    scale: float = Field(1.0, description="factor on the summed task vectors, the paper's lambda")
    normalize: bool = Field(False, description="divide the sum by the sum of the models' weights")

    @property
    def divides_by_weights(self) -> bool:
        return self.normalize

    @property
    def may_add_nothing(self) -> bool:
        return True

    def coefficients(self, weights: Sequence[float]) -> list[float]:
        scale = self.scale / (sum(weights) or 1.0) if self.normalize else self.scale
        return [scale * weight for weight in weights]

    def merge(self, site: Site) -> Tensor:
        coefficients = self.coefficients([task.weight for task in site.tasks])
        return add_models(site, 1 - sum(coefficients), coefficients)
