"""SCE: select where models differ most, calculate weights, erase minorities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Measuring, Method, Pass
from matsmerge.methods.site import Site, Task, stack_deltas
from matsmerge.methods.trimming import find_ranked

_SMALLEST = 1e-6  # mergekit's: task vectors smaller than this all count the same


class Sce(Method):
    """theta = theta_base + sum_m c_m d_m [agrees] / sum_m c_m [agrees].

    d_m are the task vectors where their variance over models is among the `select_topk` largest of
    those in a parameter that are not zero. c_m is w_m times the mean square of d_m; where these
    add up to less than 1e-6, as in mergekit, it is w_m. An entry agrees if it has the sign of
    sum_m d_m. Wan et al., 2024 (arXiv:2408.07990).
    """

    name = "sce"
    needs_base = True

    select_topk: float = Field(1.0, ge=0, le=1, description="share of the varying entries to merge")

    @property
    def measured_over(self) -> Literal["parameter"]:
        return "parameter"

    def measure(self, tasks: Sequence[Task], num_elements: int) -> Measuring:
        threshold = 0.0
        if self.select_topk < 1:
            num_varying = sum((yield Pass(_count_varying)))
            num_kept = int(num_varying * self.select_topk)
            if num_kept == 0:
                return {"threshold": [0.0], "weights": [0.0] * len(tasks)}
            ((threshold,),) = yield from find_ranked([[num_kept]], num_elements, _variances)
        sums = np.sum((yield Pass(_Squares(threshold))), axis=0)
        means = sums / num_elements
        weights = np.array([task.weight for task in tasks])
        if means.sum() >= _SMALLEST:
            weights *= means / means.sum()
        return {"threshold": [threshold], "weights": weights.tolist()}

    def merge(self, site: Site) -> Tensor:
        base = site.load_base()
        deltas = _select(site, base, site.measured["threshold"][0])
        weights = deltas.new_tensor(site.measured["weights"])
        total = deltas.sum(0)
        sign = torch.copysign(torch.ones_like(total), total)
        agreeing = deltas.mul_(sign).relu_()
        merged = (weights @ agreeing).mul_(sign)
        divisor = weights @ agreeing.gt_(0)
        return base.add_(merged.div_(divisor.clamp_min_(_SMALLEST)))


def _variances(site: Site) -> list[Tensor]:
    return [_variance(stack_deltas(site, site.load_base()))]


def _count_varying(site: Site) -> int:
    return int(_variances(site)[0].count_nonzero())


def _select(site: Site, base: Tensor, threshold: float) -> Tensor:  # (models, elements)
    deltas = stack_deltas(site, base)
    return deltas.mul_(_variance(deltas) >= threshold) if threshold else deltas


def _variance(deltas: Tensor) -> Tensor:
    # `Tensor.var` over the first dimension takes ten times as long.
    mean = deltas.sum(0).div_(len(deltas))
    return (deltas - mean).square_().sum(0).div_(len(deltas))


@dataclass(frozen=True)
class _Squares:
    threshold: float

    def __call__(self, site: Site) -> NDArray[np.float64]:  # (models,)
        deltas = _select(site, site.load_base(), self.threshold).double()
        return deltas.square_().sum(1).numpy()
