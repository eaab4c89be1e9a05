"""DARE: drop entries of the task vectors at random, rescale the rest."""

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.limits import NUM_SEEDS
from matsmerge.methods.draws import LEVELS, draw
from matsmerge.methods.method import Method
from matsmerge.methods.sign_election import merge_agreeing
from matsmerge.methods.site import Site, SiteTask, load_deltas, stack_deltas, total_weight


class _Dare(Method):
    needs_base = True

    scale: float = Field(1.0, description="factor on the merged task vector")
    density: float = Field(0.5, ge=1 / LEVELS, le=1, description="share of entries kept")
    rescale: bool = Field(True, description="divide what is kept by the density")
    seed: int = Field(0, ge=0, lt=NUM_SEEDS, description="seed of the random choice")

    def _thin_(self, delta: Tensor, site: Site, task: SiteTask) -> None:
        levels = max(1, round(task.density * LEVELS))
        if levels < LEVELS:
            is_dropped = torch.from_numpy(draw(self.seed, site, task) >= levels)
            delta.masked_fill_(is_dropped.to(delta.device), 0)
            if self.rescale:
                delta.mul_(LEVELS / levels)


class DareLinear(_Dare):
    """Task arithmetic on randomly thinned task vectors. Yu et al., 2024 (arXiv:2311.03099)."""

    name = "dare_linear"

    normalize: bool = Field(False, description="divide the sum by the sum of the models' weights")

    @property
    def divides_by_weights(self) -> bool:
        return self.normalize

    @property
    def may_add_nothing(self) -> bool:
        return True

    def merge(self, site: Site) -> Tensor:
        base = site.load_base()
        result = base.clone()
        scale = self.scale / (total_weight(site.tasks) if self.normalize else 1.0)
        for task, delta in load_deltas(site, base):
            self._thin_(delta, site, task)
            result.add_(delta, alpha=scale * task.weight)
        return result


class DareTies(_Dare):
    """The sign election of TIES on randomly thinned task vectors (arXiv:2311.03099)."""

    name = "dare_ties"

    normalize: bool = Field(True, description="average what agrees with the sign; else sum it")

    def merge(self, site: Site) -> Tensor:
        base = site.load_base()
        deltas = stack_deltas(site, base)
        for delta, task in zip(deltas, site.tasks, strict=True):
            self._thin_(delta, site, task)
        weights = [task.weight for task in site.tasks]
        merged = merge_agreeing(deltas, weights, normalize=self.normalize)
        return base.add_(merged, alpha=self.scale)
