"""Model Stock: how far to walk from the base towards the average."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from matsmerge.methods.method import Measuring, Method, Pass
from matsmerge.methods.site import Site, Task, combine, stack_deltas, total_weight


class ModelStock(Method):
    """theta = t * average + (1 - t) * theta_base, t = N cos / (1 + (N - 1) cos), per parameter.

    `cos` is the mean cosine between the task vectors of all pairs of the N models.
    Jang et al., 2024 (arXiv:2403.19522).
    """

    name = "model_stock"
    needs_base = True

    @property
    def measured_over(self) -> Literal["parameter"]:
        return "parameter"

    @property
    def divides_by_weights(self) -> bool:
        return True

    def measure(self, tasks: Sequence[Task], num_elements: int) -> Measuring:  # noqa: ARG002
        gram = np.sum((yield Pass(_inner_products)), axis=0)  # (models, models)
        norms = np.sqrt(np.diag(gram))
        scale = np.outer(norms, norms)
        cosines = np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)
        num = len(tasks)
        pairs = cosines[np.triu_indices(num, k=1)]
        cosine = float(np.clip(pairs, -1, 1).mean()) if num > 1 else 1.0
        below = 1 + (num - 1) * cosine
        # Task vectors that cancel leave no direction to walk in: stay at the base.
        ratio = num * cosine / below if below > 1e-6 else 0.0
        return {"cosine": [cosine], "ratio": [ratio]}

    def merge(self, site: Site) -> Tensor:
        (ratio,) = site.measured["ratio"]
        total = total_weight(site.tasks)
        return combine(site, 1 - ratio, [ratio * task.weight / total for task in site.tasks])


def _inner_products(site: Site) -> NDArray[np.float64]:
    deltas = stack_deltas(site, site.load_base())
    return (deltas @ deltas.T).double().numpy()
