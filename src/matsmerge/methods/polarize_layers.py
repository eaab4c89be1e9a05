"""Large changes made larger and small ones smaller, weight by weight: the last step of ESM."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.limits import MOST_POWER
from matsmerge.methods.method import Measuring, Method, Pass
from matsmerge.methods.site import Measured, Site, SiteTask, add_models

# Of a parameter the sum of squares of its change.
Squares = tuple[str, float]


class PolarizeLayers(Method):
    """theta = theta_base + scale (|d| / mean |d|)^power d, d = theta_1 - theta_base.

    |d| is the norm of a matrix's change, and the mean is that of the matrices whose names differ
    from its own in numbers of layers alone. Parameters that are no matrices have the factor
    `scale`. For the result of any merge: the inter-layer scaling of ESM (Li et al., 2026,
    arXiv:2602.20208).
    """

    name = "polarize_layers"
    needs_base = True
    num_models = 1

    power: float = Field(
        2.0, ge=0, le=MOST_POWER, description="how much sizes of changes are driven apart"
    )
    scale: float = Field(1.0, description="factor on all changes")

    @property
    def measured_over(self) -> Literal["model"]:
        return "model"

    def measure(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:  # noqa: ARG002
        (squares,) = _added((yield Pass(_squares, fold=_added)))
        norms = {name: square**0.5 for name, square in squares}
        of_kinds = defaultdict(list)
        for name, norm in norms.items():
            of_kinds[_kind(name)].append(norm)
        means = {kind: sum(own) / len(own) for kind, own in of_kinds.items()}
        return {name: [norm / (means[_kind(name)] or 1.0)] for name, norm in norms.items()}

    def measured_of(self, parameter: str, measured: Measured) -> Measured:
        return {"ratio": measured.get(parameter, [1.0])}

    def merge(self, site: Site) -> Tensor:
        (ratio,) = site.measured["ratio"]
        factor = self.scale * ratio**self.power
        return add_models(site, 1 - factor, [factor])


def _kind(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _squares(site: Site) -> list[Squares]:
    if len(site.shape) <= 1:
        return []
    change = site.tasks[0].load() - site.load_base()
    return [(site.parameter, float(torch.dot(change, change)))]


def _added(notes: Iterable[Sequence[Squares]]) -> list[list[Squares]]:
    sums: dict[str, float] = defaultdict(float)
    for note in notes:
        for name, square in note:
            sums[name] += square
    return [list(sums.items())]
