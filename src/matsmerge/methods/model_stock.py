"""Model Stock: how far to walk from the base towards the average."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Measuring, Method, Pass
from matsmerge.methods.site import Grain, Site, SiteTask, add_models, stack_deltas, total_weight


class ModelStock(Method):
    """theta = t * average + (1 - t) * theta_base, t = N cos / (1 + (N - 1) cos), per parameter.

    `cos` is the mean cosine between the task vectors of all pairs of the N models.
    Jang et al., 2024 (arXiv:2403.19522).
    """

    name = "model_stock"
    needs_base = True

    filter_wise: bool = Field(False, description="for each row of a weight, not for all of it")

    @property
    def grain(self) -> Grain:  # type: ignore[override]  # of the class, for all other methods
        return Grain.TENSOR if self.filter_wise else Grain.STRETCH

    @property
    def measured_over(self) -> Literal["parameter"] | None:
        return None if self.filter_wise else "parameter"

    @property
    def divides_by_weights(self) -> bool:
        return True

    def measure(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:  # noqa: ARG002
        gram = np.sum((yield Pass(_inner_products)), axis=0)  # (models, models)
        cosine, ratio = _mean_cosine(gram)
        return {"cosine": [float(cosine)], "ratio": [float(ratio)]}

    def merge(self, site: Site) -> Tensor:
        total = total_weight(site.tasks)
        if self.filter_wise:
            base = site.load_base().view(-1, site.shape[-1] if site.shape else 1)  # (rows, columns)
            deltas = stack_deltas(site, base.view(-1)).view(-1, *base.shape)
            grams = torch.einsum("arc,brc->rab", deltas, deltas).double().numpy()
            _, ratios = _mean_cosine(grams)
            shares = base.new_tensor([task.weight / total for task in site.tasks])
            average = torch.tensordot(shares, deltas, dims=1)
            return base.addcmul(base.new_tensor(ratios)[:, None], average).view(-1)
        (ratio,) = site.measured["ratio"]
        return add_models(site, 1 - ratio, [ratio * task.weight / total for task in site.tasks])


def _mean_cosine(gram: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mean cosine of all pairs, and the ratio t, for inner products (..., models, models)."""
    num = gram.shape[-1]
    norms = np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1))
    scale = norms[..., :, None] * norms[..., None, :]
    cosines = np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)
    first, second = np.triu_indices(num, k=1)
    pairs = np.clip(cosines[..., first, second], -1, 1)
    cosine = pairs.mean(-1) if num > 1 else np.ones(gram.shape[:-2])
    below = 1 + (num - 1) * cosine
    # Task vectors that cancel leave no direction to walk in: stay at the base.
    ratio = np.where(below > 1e-6, num * cosine / np.where(below > 1e-6, below, 1), 0.0)
    return cosine, ratio


def _inner_products(site: Site) -> NDArray[np.float64]:
    deltas = stack_deltas(site, site.load_base())
    return (deltas @ deltas.T).double().numpy()
