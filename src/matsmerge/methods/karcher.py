"""The Karcher mean: the point on a sphere whose distances to all models are least."""

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from matsmerge.methods.spherical import Matrix, SphericalMethod

_OPPOSITE = 1e-6  # sine of the angle between points that are taken as opposite


class KarcherMean(SphericalMethod):
    """theta = (sum_m w_m |theta_m|) mu, mu the Riemannian mean of theta_m / |theta_m|.

    mu, from the mean of these directions on, goes along sum_m w_m log_mu(theta_m / |theta_m|) until
    that is shorter than `tol`; w_m add up to one. All of it is in the span of the models, so that
    their inner products are enough. Grove & Karcher, 1973; arXiv:2603.04972.
    """

    name = "karcher"

    max_iter: int = Field(10, ge=0, description="most steps towards the mean")
    tol: float = Field(1e-5, gt=0, description="length of a step, or of a model, that is none")

    @property
    def divides_by_weights(self) -> bool:
        return True

    def mix(self, gram: Matrix, weights: Sequence[float]) -> Sequence[float]:
        norms = np.sqrt(np.diag(gram))
        w = np.array(weights) / sum(weights)
        is_vector = norms > self.tol
        if not is_vector.any() or w[is_vector].sum() == 0:
            return [float(c) for c in w]
        inverse = np.divide(1, norms, out=np.zeros_like(norms), where=is_vector)
        cosines = np.outer(inverse, inverse) * gram  # of the directions u_m
        alpha = w * is_vector / w[is_vector].sum()
        mean = alpha  # as coefficients of the directions
        if _length(mean, cosines) < self.tol:
            mean = np.eye(len(w))[np.argmax(is_vector)]
        mean = mean / _length(mean, cosines)
        for _ in range(self.max_iter):
            dots = np.clip(cosines @ mean, -1, 1)
            angles = np.arccos(dots)
            # The opposite point has no logarithm, and near it rounding decides on a direction.
            has_step = is_vector & (angles > self.tol) & (np.sin(angles) > _OPPOSITE)
            steps = np.divide(alpha * angles, np.sin(angles), out=np.zeros_like(w), where=has_step)
            tangent = steps - (steps @ dots) * mean
            length = _length(tangent, cosines)
            if length < self.tol:
                break
            mean = np.cos(length) * mean + np.sin(length) / length * tangent
            mean = mean / _length(mean, cosines)
        return [float(c) for c in (w @ norms) * mean * inverse]


def _length(coefficients: Matrix, gram: Matrix) -> float:
    return math.sqrt(max(0.0, float(coefficients @ gram @ coefficients)))
