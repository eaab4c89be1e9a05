"""Multi-SLERP: the weighted mean direction of several models, at their mean length."""

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from matsmerge.methods.spherical import Matrix, OptionalBase


class MultiSlerp(OptionalBase):
    """theta = (sum_m w_m |theta_m|) u / |u|, u = sum_m w_m theta_m / |theta_m|, per parameter.

    Weights add up to one, unless `normalize_weights` is off. That is mergekit's multislerp: the
    step it takes in the tangent space of u is zero, since u is the mean itself. Vectors that cancel
    are added up linearly. Goddard, 2025.
    """

    name = "multislerp"

    normalize_weights: bool = Field(True, description="divide weights by their sum")
    eps: float = Field(1e-8, gt=0, description="length of u below which vectors cancel")

    @property
    def divides_by_weights(self) -> bool:
        return self.normalize_weights

    def mix(self, gram: Matrix, weights: Sequence[float]) -> Sequence[float]:
        if len(weights) == 1:
            return [1.0]
        w = np.array(weights)
        if self.normalize_weights:
            w /= w.sum()
        norms = np.sqrt(np.diag(gram))
        directions = np.divide(w, norms, out=np.zeros_like(w), where=norms > 0)
        length = math.sqrt(max(0.0, float(directions @ gram @ directions)))
        mixed = w if length < self.eps else (w @ norms) / length * directions
        return [float(c) for c in mixed]
