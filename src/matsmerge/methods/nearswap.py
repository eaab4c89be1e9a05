"""NearSwap: towards another model, by at most a fixed step."""

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Method
from matsmerge.methods.site import Site


class NearSwap(Method):
    """theta = theta_1, but no further than t from theta_base, entry by entry.

    Alchemonaut, 2024: where the two are near, they are swapped.
    """

    name = "nearswap"
    needs_base = True
    num_models = 1

    t: float = Field(ge=0, description="the largest change of an entry")

    def merge(self, site: Site) -> Tensor:
        base = site.load_base()
        return torch.clamp(site.tasks[0].load(), base - self.t, base + self.t)
