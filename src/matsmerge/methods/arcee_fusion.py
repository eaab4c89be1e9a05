"""Arcee Fusion: the changes of one model that matter most."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from matsmerge.methods.method import Measuring, Method
from matsmerge.methods.site import Site, Task
from matsmerge.methods.trimming import find_ranked

_EPSILON = 1e-8  # mergekit's, added to probabilities


class ArceeFusion(Method):
    """theta = theta_1 where a change is important, else theta_base.

    Importance is |theta_1 - theta_base| times the divergence KL(softmax(row of theta_1) ||
    softmax(row of theta_base)), a row being along the last dimension; it has to reach median + 1.5
    (upper - lower quartile) of the parameter. Quartiles are exact, where mergekit samples large
    parameters.
    """

    name = "arcee_fusion"
    needs_base = True
    num_models = 1

    @property
    def measured_over(self) -> Literal["parameter"]:
        return "parameter"

    @property
    def works_on_changes(self) -> bool:
        return False

    def measure(self, tasks: Sequence[Task], num_elements: int) -> Measuring:  # noqa: ARG002
        ranks = [num_elements - int(q * (num_elements - 1)) for q in (0.25, 0.5, 0.75)]
        ((lower, median, upper),) = yield from find_ranked([ranks], num_elements, _importance)
        return {"threshold": [median + 1.5 * (upper - lower)]}

    def merge(self, site: Site) -> Tensor:
        (importance,), (threshold,) = _importance(site), site.measured["threshold"]
        return torch.where(importance >= threshold, site.tasks[0].load(), site.load_base())


def _importance(site: Site) -> list[Tensor]:
    length = max(1, site.shape[-1]) if site.shape else 1
    rows, own = site.whole_rows(length)
    base, model = (v.double().view(-1, length) for v in (rows.load_base(), rows.tasks[0].load()))
    p, q = (v.softmax(1).add_(_EPSILON) for v in (model, base))
    divergence = (p * (p / q).log_()).sum(1, keepdim=True).clamp_min_(0)
    return [model.sub_(base).abs_().mul_(divergence).view(-1)[own]]
