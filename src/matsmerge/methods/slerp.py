"""Spherical linear interpolation of two models."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from matsmerge.methods.method import Measuring, Method, Pass
from matsmerge.methods.site import Site, Task, total_weight

_NEARLY_PARALLEL = 0.9995  # beyond this |cosine| the arc is a line, and sin(angle) near zero


class Slerp(Method):
    """theta = (sin((1 - t) a) theta_1 + sin(t a) theta_2) / sin(a), per parameter.

    `a` is the angle between the two models' tensors and t = w_2 / (w_1 + w_2): the models'
    weights say where on the arc to stop. Shoemake, 1985.
    """

    name = "slerp"
    num_models = 2

    @property
    def measured_over(self) -> Literal["parameter"]:
        return "parameter"

    @property
    def divides_by_weights(self) -> bool:
        return True

    @property
    def works_on_changes(self) -> bool:
        return False

    def measure(self, tasks: Sequence[Task], num_elements: int) -> Measuring:  # noqa: ARG002
        square_1, square_2, product = np.sum((yield Pass(_squares_and_product)), axis=0)
        norms = math.sqrt(square_1 * square_2)
        cosine = min(1.0, max(-1.0, product / norms)) if norms else 0.0
        t = tasks[1].weight / total_weight(tasks)
        if abs(cosine) > _NEARLY_PARALLEL:
            return {"cosine": [cosine], "coefficients": [1 - t, t]}
        angle = math.acos(cosine)
        coefficients = [math.sin((1 - t) * angle), math.sin(t * angle)]
        return {"cosine": [cosine], "coefficients": [c / math.sin(angle) for c in coefficients]}

    def merge(self, site: Site) -> Tensor:
        first, second = site.tasks
        alpha, beta = site.measured["coefficients"]
        return first.load().mul_(alpha).add_(second.load(), alpha=beta)


def _squares_and_product(site: Site) -> NDArray[np.float64]:
    first, second = (task.load().double() for task in site.tasks)
    return np.array(
        [torch.dot(a, b) for a, b in ((first, first), (second, second), (first, second))]
    )
