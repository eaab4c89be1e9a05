"""Magnitude pruning: the largest entries of each task vector, added up."""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Measuring
from matsmerge.methods.site import Site, SiteTask
from matsmerge.methods.thinning import ThinnedMethod
from matsmerge.methods.trimming import measure_thresholds, trim_rows_


class MagnitudePrune(ThinnedMethod):
    """Task arithmetic on task vectors trimmed to their largest entries, within each parameter.

    The combination that PEFT calls `magnitude_prune`; there of adapters' factors, here of the
    changes they make.
    """

    name = "magnitude_prune"

    density: float = Field(0.5, gt=0, le=1, description="share of each task vector's entries kept")

    def choose(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:
        return (yield from measure_thresholds([task.density for task in tasks], num_elements))

    def thin_(self, site: Site, deltas: Tensor, own: slice) -> None:  # noqa: ARG002
        trim_rows_(site, deltas)
