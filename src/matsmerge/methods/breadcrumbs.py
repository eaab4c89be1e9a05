"""Model Breadcrumbs: task vectors without their smallest and without their largest entries."""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Measuring
from matsmerge.methods.site import Shares, Site, SiteTask
from matsmerge.methods.thinning import ThinnedMethod
from matsmerge.methods.trimming import find_ranked, trim_


class Breadcrumbs(ThinnedMethod):
    """Task arithmetic on task vectors without outliers and without what is small.

    Of the n entries of a task vector in a parameter the gamma * n largest are dropped, then the
    smallest until density * n are left; where there is not room for both, fewer outliers are.
    What equals the first or the last one kept is kept, too. Davari & Belilovsky, 2024
    (arXiv:2312.06795).
    """

    name = "breadcrumbs"
    shares_of_models = ("density", "gamma")

    gamma: float = Field(0.01, ge=0, lt=1, description="share of the largest entries to drop")

    def share_problem(self, shares: Shares) -> str | None:
        if 0 <= shares.gamma < 1:
            return None
        return f"gamma must be at least 0 and less than 1, found {shares.gamma}"

    def choose(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:
        ranks = [_kept(task.shares, num_elements) for task in tasks]
        found = yield from find_ranked([r if r[0] <= r[1] else () for r in ranks], num_elements)
        # Where nothing is kept, nothing is smaller than 0 and at least 1.
        bounds = [bounds if bounds else [0.0, 1.0] for bounds in found]
        return {"highest": [b[0] for b in bounds], "lowest": [b[1] for b in bounds]}

    def thin_(self, site: Site, deltas: Tensor, own: slice) -> None:  # noqa: ARG002
        if site.measured:
            highest, lowest = site.measured["highest"], site.measured["lowest"]
            for delta, task, high, low in zip(deltas, site.tasks, highest, lowest, strict=True):
                if task.density < 1:
                    trim_(delta, low)
                    delta.mul_(delta.abs() <= high)


class BreadcrumbsTies(Breadcrumbs):
    """The sign election of TIES on the task vectors of `breadcrumbs`."""

    name = "breadcrumbs_ties"
    elects = True

    normalize: bool = Field(False, description="average what agrees with the sign; else sum it")


def _kept(shares: Shares, num_elements: int) -> tuple[int, int]:
    """The ranks of the largest and the smallest entry that stay; the second is less for none."""
    num_kept = int(shares.density * num_elements)
    num_dropped = min(int(shares.gamma * num_elements), num_elements - num_kept)
    return num_dropped + 1, num_dropped + num_kept
