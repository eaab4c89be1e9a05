"""RAM: changes that only one model makes are kept whole, those that several make are averaged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Measuring, Method, Pass
from matsmerge.methods.site import Site, SiteTask, stack_deltas


class ReinforcedAgentMerging(Method):
    """theta = theta_base + sum_m w_m d_m / sum_m w_m [d_m != 0].

    d_m are the task vectors without entries of at most `epsilon`: Reinforced Agent Merging, 2026
    (arXiv:2601.13572).
    """

    name = "ram"
    needs_base = True
    shares_of_models = ()

    epsilon: float = Field(1e-5, ge=0, description="largest change that counts as none")

    def merge(self, site: Site) -> Tensor:
        base = site.load_base()
        deltas = stack_deltas(site, base)
        changed = (deltas.abs() > self.epsilon).to(deltas.dtype)
        deltas.mul_(changed)
        if "factors" in site.measured:
            is_alone = changed.sum(0) == 1
            factors = deltas.new_tensor(site.measured["factors"])[:, None]
            deltas.mul_((factors - 1) * is_alone + 1)
        weights = deltas.new_tensor([task.weight for task in site.tasks])
        total = weights @ changed
        return base.add_((weights @ deltas).div_(total.masked_fill_(total == 0, 1)))


class RamPlus(ReinforcedAgentMerging):
    """RAM with what only one model changes multiplied by 1 + r min(alpha, shared / unique).

    `shared` and `unique` are how many entries of a parameter the model changes together with
    others, and alone: RAM+ within each tensor.
    """

    name = "ramplus_tl"

    r: float = Field(0.1, description="how much changes of one model are amplified")
    alpha: float = Field(0.2, ge=0, description="ratio of shared to unique changes that is enough")

    @property
    def measured_over(self) -> Literal["parameter"]:
        return "parameter"

    def measure(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:  # noqa: ARG002
        shared, unique = np.sum((yield Pass(_Counts(self.epsilon))), axis=0)
        ratios = np.minimum(self.alpha, shared / np.maximum(1, unique))
        return {"factors": (1 + self.r * ratios).tolist()}


@dataclass(frozen=True)
class _Counts:
    """How many entries each model changes together with others, and alone."""

    epsilon: float

    def __call__(self, site: Site) -> list[list[int]]:  # (2, models)
        changed = stack_deltas(site, site.load_base()).abs_() > self.epsilon
        is_alone = changed.sum(0) == 1
        unique = (changed & is_alone).sum(1)
        # Notes are kept: as tensors they would lie among blocks that are freed, and scatter these.
        return [(changed.sum(1) - unique).tolist(), unique.tolist()]
