"""What methods share that interpolate on a sphere: linear combinations by inner products."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from matsmerge.methods.method import Measuring, Method, Pass
from matsmerge.methods.site import Site, SiteTask, add_models, scratch, weighted_sum

Matrix = NDArray[np.float64]

_DOUBLE = torch.empty(0, dtype=torch.float64, device="cpu")  # where passes are made


class SphericalMethod(Method):
    """theta = sum_m c_m theta_m, or of task vectors, with c_m from their inner products."""

    @abstractmethod
    def mix(self, gram: Matrix, weights: Sequence[float]) -> Sequence[float]:
        """c_m from the inner products of a parameter in all models, (models, models)."""

    @property
    def measured_over(self) -> Literal["parameter"] | None:
        return "parameter"

    @property
    def works_on_changes(self) -> bool:
        return self.reads_base

    def measure(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:  # noqa: ARG002
        gram = np.sum((yield Pass(_InnerProducts(self.reads_base))), axis=0)
        mixed = self.mix(gram, [task.weight for task in tasks])
        return {"coefficients": [float(c) for c in mixed]}

    def merge(self, site: Site) -> Tensor:
        coefficients = site.measured["coefficients"]
        if self.reads_base:
            return add_models(site, 1 - sum(coefficients), coefficients)
        return weighted_sum(site, coefficients)


class OptionalBase(SphericalMethod):
    """Methods that may be told to take task vectors."""

    task_vectors: bool = Field(
        False, description="interpolate the changes from the base, not the weights"
    )

    @property
    def reads_base(self) -> bool:
        return self.task_vectors


@dataclass(frozen=True)
class _InnerProducts:
    of_deltas: bool

    def __call__(self, site: Site) -> Matrix:  # (models, models)
        length = site.stop - site.start
        rows = scratch("rows", (len(site.tasks), length), _DOUBLE)
        base = site.load_base(scratch("base", (length,), _DOUBLE)) if self.of_deltas else None
        for row, task in zip(rows, site.tasks, strict=True):
            task.load(out=row)
            if base is not None:
                row.sub_(base)
        return (rows @ rows.T).numpy()


def arc(cosine: float, t: float) -> tuple[float, float]:
    """Coefficients of two vectors for the point at t on the arc between them."""
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def cosine_of(gram: Matrix) -> float:
    """The cosine between two vectors; 0 if one of them is none."""
    norms = math.sqrt(gram[0, 0] * gram[1, 1])
    return min(1.0, max(-1.0, gram[0, 1] / norms)) if norms else 0.0
