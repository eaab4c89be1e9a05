"""Spherical linear interpolation of two models."""

from collections.abc import Sequence

from matsmerge.methods.spherical import Matrix, SphericalMethod, arc, cosine_of

_NEARLY_PARALLEL = 0.9995  # beyond this |cosine| the arc is a line, and sin(angle) near zero


class Slerp(SphericalMethod):
    """theta = (sin((1 - t) a) theta_1 + sin(t a) theta_2) / sin(a), per parameter.

    `a` is the angle between the two models' tensors and t = w_2 / (w_1 + w_2): the models'
    weights say where on the arc to stop. Shoemake, 1985.
    """

    name = "slerp"
    num_models = 2

    @property
    def divides_by_weights(self) -> bool:
        return True

    def mix(self, gram: Matrix, weights: Sequence[float]) -> Sequence[float]:
        cosine, t = cosine_of(gram), weights[1] / sum(weights)
        return (1 - t, t) if abs(cosine) > _NEARLY_PARALLEL else arc(cosine, t)
