"""TIES: trim, elect sign, merge."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Measuring
from matsmerge.methods.site import Site, SiteTask
from matsmerge.methods.thinning import ThinnedMethod
from matsmerge.methods.trimming import measure_thresholds, trim_rows_


class Ties(ThinnedMethod):
    """Keep each task vector's largest entries, elect a sign per entry, average what agrees.

    Yadav et al., 2023 (arXiv:2306.01708). Entries at least as large as the k-th largest stay, k =
    density * (number of entries); with `trim: global` the k-th largest of the whole model, as
    in the paper, else of each parameter.
    """

    name = "ties"
    elects = True

    density: float = Field(0.2, gt=0, le=1, description="share of each task vector's entries kept")
    trim: Literal["global", "parameter"] = Field(
        "global", description="rank entries over the whole model or within each parameter"
    )
    normalize: bool = Field(True, description="average what agrees with the sign; else sum it")

    @property
    def measured_over(self) -> Literal["parameter", "model"]:
        return "model" if self.trim == "global" else "parameter"

    @property
    def measured_as(self) -> object:
        return Ties, self.rescale

    def choose(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:
        return (yield from measure_thresholds([task.density for task in tasks], num_elements))

    def thin_(self, site: Site, deltas: Tensor, own: slice) -> None:  # noqa: ARG002
        trim_rows_(site, deltas)
