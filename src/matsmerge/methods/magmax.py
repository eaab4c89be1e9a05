"""MagMax: of every entry the largest change."""

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Method
from matsmerge.methods.site import Site, stack_deltas


class MagMax(Method):
    """theta = theta_base + scale * (of all w_m (theta_m - theta_base) the largest in magnitude).

    Marczak et al., 2024 (arXiv:2407.06322), with a scale of 0.5 in their script. Of two changes of
    the same size in opposite directions the positive one is taken, so that the order of the models
    does not matter.
    """

    name = "magmax"
    needs_base = True

    scale: float = Field(1.0, description="factor on the merged task vector, the paper's lambda")

    def merge(self, site: Site) -> Tensor:
        base = site.load_base()
        deltas = stack_deltas(site, base)
        deltas.mul_(deltas.new_tensor([task.weight for task in site.tasks])[:, None])
        highest, lowest = deltas.amax(0), deltas.amin(0)
        largest = torch.where(highest >= -lowest, highest, lowest)
        return base.add_(largest, alpha=self.scale)
