"""Localize-and-Stitch without data: the largest changes, averaged where tasks share some."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Measuring, Method
from matsmerge.methods.site import Site, SiteTask
from matsmerge.methods.trimming import measure_thresholds, stack_trimmed


class LocalizeAndStitch(Method):
    """theta = theta_base + sum_m w_m d_m / sum_m w_m [d_m != 0], d_m the trimmed task vectors.

    Of each task vector the entries at least as large as its k-th largest are kept, k = density *
    (number of entries of the model); where no task keeps one, the base stays. The dataless variant
    of He et al., 2024 (arXiv:2408.13656); the other one learns its masks from data.
    """

    name = "localize_and_stitch"
    needs_base = True

    density: float = Field(0.05, gt=0, le=1, description="share of each task vector's entries kept")

    @property
    def measured_over(self) -> Literal["model"]:
        return "model"

    def measure(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:
        return (yield from measure_thresholds([task.density for task in tasks], num_elements))

    def merge(self, site: Site) -> Tensor:
        base = site.load_base()
        deltas = stack_trimmed(site, base)
        weights = deltas.new_tensor([task.weight for task in site.tasks])
        merged = weights @ deltas
        overlap = weights @ deltas.ne(0).to(deltas.dtype)
        return base.add_(merged.div_(overlap.masked_fill_(overlap == 0, 1)))
