"""Covariances made from the weights alone, for when there is no data.

To first order a linear layer's weights move along its inputs, so that the second moment of the
rows of Δ_m = W_m - W_base stands for the one of the inputs.
"""

from abc import abstractmethod

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.linalg.operators import Gram, Operator
from matsmerge.methods.objectives.objective import Found, Objective, Part, Subject


class _FromWeights(Objective):
    needs_base = True
    for_vectors = False

    def find(self, subject: Subject) -> Found | None:
        if subject.view.seen not in ("linear", "conv1d"):
            return None
        num_outputs, num_inputs = subject.shape
        if subject.view.seen == "conv1d":
            num_outputs, num_inputs = num_inputs, num_outputs
        return Found(subject.view, num_outputs, num_inputs, is_dense=True)

    def operator(self, found: Found, part: Part) -> Operator:  # noqa: ARG002
        return Gram(self.second_moment(part.load_delta()))

    @abstractmethod
    def second_moment(self, delta: Tensor) -> Tensor:  # (out, in) -> (in, in)
        """What stands for the second moment of the inputs."""


class ActMat(_FromWeights):
    """G_m = Δ_mᵀ Δ_m (Hameed et al., 2026, arXiv:2604.01329)."""

    name = "actmat"

    def second_moment(self, delta: Tensor) -> Tensor:
        return delta.mT @ delta


class Wudi(_FromWeights):
    """G_m = Δ_mᵀ Δ_m / |Δ_m|²: every model counts the same (Cheng et al., 2025, arXiv:2503.08099).

    The loss its authors minimise with Adam is this objective.
    """

    name = "wudi"

    def second_moment(self, delta: Tensor) -> Tensor:
        size = float(delta.square().sum())
        return delta.mT @ delta / (size or 1.0)


class Tact(_FromWeights):
    """G_m = Δ_mᵀ Δ_m of a task vector trimmed to its largest entries; half of them as published."""

    name = "tact"

    density: float = Field(0.5, gt=0, le=1, description="share of each task vector to keep")

    def second_moment(self, delta: Tensor) -> Tensor:
        num_kept = max(1, round(self.density * delta.numel()))
        # By number, not by size: in low precision many entries are equal.
        flat = delta.flatten()
        kept = flat.abs().topk(num_kept, sorted=False).indices
        trimmed = torch.zeros_like(flat)
        trimmed[kept] = flat[kept]
        trimmed = trimmed.view(delta.shape)
        return trimmed.mT @ trimmed


class CenteredActMat(_FromWeights):
    """G_m = Δ̄_mᵀ Δ̄_m + ridge, Δ̄_m without its mean over outputs.

    ACE-Merging (Xu et al., 2026, arXiv:2603.02945) begins with this covariance. It also centres
    the weights it averages, adds a prior that all models share, and refines the spectrum of the
    solution; this objective does none of that, so it has a name of its own.
    """

    name = "centered_actmat"

    ridge: float = Field(
        0.01,
        allow_inf_nan=False,
        ge=0,
        description="added to the diagonal, relative to its mean: towards the average",
    )

    def second_moment(self, delta: Tensor) -> Tensor:
        centred = delta - delta.mean(0, keepdim=True)
        moment = centred.mT @ centred
        diagonal = moment.diagonal()
        diagonal += self.ridge * diagonal.mean()
        return moment
