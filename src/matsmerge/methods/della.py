"""DELLA: drop entries of the task vectors at random, small ones more often."""

from functools import lru_cache
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from matsmerge.limits import NUM_SEEDS
from matsmerge.linalg.selection import FloatArray
from matsmerge.methods.draws import LEVELS, draw
from matsmerge.methods.site import Shares, Site, SiteTask
from matsmerge.methods.thinning import ThinnedMethod


class DellaLinear(ThinnedMethod):
    """Task arithmetic on task vectors thinned at random, by the ranks of their entries.

    In a row of n entries (all weights of one output; a vector is one row) the one of rank r = 0 ...
    n - 1, largest last, is kept with probability density - epsilon + 2 epsilon r / (n - 1). Equal
    entries share their mean rank. Deep, Bhardwaj & Poria, 2024 (arXiv:2406.11617), rescaled to
    the sum of magnitudes where the paper divides by single probabilities.
    """

    name = "della_linear"
    shares_of_models = ("density", "epsilon")

    epsilon: float = Field(
        0.15, ge=0, lt=0.5, description="how far probabilities lie below and above the density"
    )
    rescale: bool = Field(True, description="scale what is kept to the sum of magnitudes before")
    seed: int = Field(0, ge=0, lt=NUM_SEEDS, description="seed of the random choice")

    @property
    def measured_over(self) -> Literal["parameter"] | None:
        return "parameter" if self.rescale else None

    def share_problem(self, shares: Shares) -> str | None:
        low, high = shares.density - shares.epsilon, shares.density + shares.epsilon
        if shares.density == 1 or (0 < low <= high < 1):
            return None
        return (
            f"density {shares.density} with epsilon {shares.epsilon} makes probabilities from "
            f"{low:.4g} to {high:.4g}; choose an epsilon with which they are between 0 and 1"
        )

    def row_length(self, site: Site) -> int:
        return prod(site.shape) // (site.shape[0] if len(site.shape) > 1 else 1)

    def thin_(self, site: Site, deltas: Tensor, own: slice) -> None:
        for delta, task in zip(deltas, site.tasks, strict=True):
            if task.density < 1:
                magnitudes = delta.abs().view(-1, self.row_length(site)).cpu().numpy()
                chosen = _choose(draw(self.seed, site, task), magnitudes, own, task)
                kept = torch.from_numpy(chosen.astype(magnitudes.dtype))
                delta[own].mul_(kept.to(delta.device))


class Della(DellaLinear):
    """The sign election of TIES on the task vectors of `della_linear`."""

    name = "della"
    elects = True

    normalize: bool = Field(True, description="average what agrees with the sign; else sum it")


def _choose(
    draws: NDArray[np.uint16],  # of a site's entries
    magnitudes: FloatArray,  # (rows, length), of the rows around it
    own: slice,
    task: SiteTask,
) -> NDArray[np.bool_]:
    """Which entries of a site are kept.

    A number below density - epsilon keeps an entry of any rank, one above density + epsilon none.
    Between, it is a rank that has to be exceeded: only there magnitudes are looked at. Odd numbers
    let an entry that equals the one of this rank stay, even ones do not.
    """
    num_rows, length = magnitudes.shape
    # Only ranks are needed, for which sorting numbers is much faster than sorting places.
    ordered = np.empty((num_rows, length + 2), dtype=magnitudes.dtype)
    ordered[:, 0], ordered[:, -1] = -1, np.inf
    inner = ordered[:, 1:-1]
    inner[:] = magnitudes
    inner.sort(axis=1)
    low, bounds = _bounds(task.shares, length)
    kept = draws < low
    places = ((draws < len(bounds)) ^ kept).nonzero()[0]
    numbers, at = draws.take(places), places + own.start
    values = magnitudes.reshape(-1).take(at)
    bound = ordered.reshape(-1).take(at // length * (length + 2) + bounds.take(numbers))
    kept[places] = (values > bound) | ((values == bound) & (numbers & 1 == 1))
    return kept


@lru_cache(8)
def _bounds(shares: Shares, length: int) -> tuple[int, NDArray[np.unsignedinteger[Any]]]:
    """The first number that is a rank, and for each number where in a row is what to exceed.

    The row is in order, between something that all entries exceed and something that none does.
    """
    low = round((shares.density - shares.epsilon) * LEVELS)
    high = max(low + 1, round((shares.density + shares.epsilon) * LEVELS))
    numbers = np.arange(min(high, LEVELS))
    rank = (numbers - low) * (length - 1) // (high - low)
    may_equal = (numbers & 1 == 1) & (rank < length - 1)
    bounds = np.where(numbers < low, 0, 1 + rank + may_equal)
    # As narrow as can be: what is looked up at random then stays in the processor's cache.
    return low, bounds.astype(np.min_scalar_type(length + 1))
