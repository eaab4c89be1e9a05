"""Task arithmetic: adding up task vectors."""

from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Measured, Method, Site, load_deltas, total_weight


class TaskArithmetic(Method):
    """theta = theta_base + scale * sum_m w_m (theta_m - theta_base).

    Ilharco et al., 2023 (arXiv:2212.04089); `scale` is their lambda.
    """

    needs_base = True

    scale: float = Field(1.0, description="factor on the summed task vectors, the paper's lambda")
    normalize: bool = Field(False, description="divide the sum by the sum of the models' weights")

    @property
    def divides_by_weights(self) -> bool:
        return self.normalize

    def merge(self, site: Site, measured: Measured) -> Tensor:  # noqa: ARG002
        base = site.load_base()
        result = base.clone()
        scale = self.scale / (total_weight(site.tasks) if self.normalize else 1.0)
        for task, delta in load_deltas(site, base):
            result.add_(delta, alpha=scale * task.weight)
        return result
