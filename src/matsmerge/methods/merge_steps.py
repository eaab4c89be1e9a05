"""Steps of a merge that stand in the place of a solver: they solve nothing, but see every model."""

from collections.abc import Iterator

from pydantic import Field
from torch import Tensor

from matsmerge.limits import MOST_POWER
from matsmerge.linalg.calibration import calibrate
from matsmerge.linalg.essential_subspaces import merge_in_subspaces
from matsmerge.linalg.operators import Paired
from matsmerge.linalg.system import Solution, Status, rate
from matsmerge.methods.objectives.objective import Found, Objective
from matsmerge.methods.solver import Problem, Solver


class SingularValueCalibration(Solver):
    """No way to a solution but a step after any merge: its singular values calibrated.

    With U S Vᵀ the change of a merged weight, a singular value S_r is divided by the mean over
    models of max(s_rm, least / M), s_rm = <u_rᵀ Δ, u_rᵀ Δ_m> / |u_rᵀ Δ_m|², so that directions
    which models share do not add up. Li et al., 2026 (arXiv:2602.05536). For linear layers.
    """

    name = "svc"
    needs_base = True
    for_vectors = False

    least: float = Field(
        1.0,
        allow_inf_nan=False,
        gt=0,
        description="lowest coefficient that counts, in units of one over the number of models: "
        "the paper's alpha times that number",
    )

    def has_use_for(self, found: Found) -> bool:
        return found.view.seen in ("linear", "conv1d")

    def solve(self, problem: Problem) -> Solution:
        base = problem.load_base()
        changes = (weights - base for _, weights in problem.load_terms())
        correction = calibrate(problem.start - base, changes, self.least)
        return rate(problem.system, correction, Status.COMPUTED)


class EssentialSubspaces(Solver):
    """No way to a solution but another merge: in the directions in which changes show on data.

    The directions of outputs in which a change does most to the layer's data, for each model as
    many as its share, are made orthogonal to each other as TSV-M does with singular vectors. What
    the released code of ESM (Li et al., 2026, arXiv:2606.19164) does for each weight of RoBERTa;
    for ViT `task_power` and `input_power` are 2 there. Its scaling of whole weights is a method
    of its own, `polarize_layers`. For linear layers.
    """

    name = "essential_subspaces"
    needs_base = True
    for_vectors = False
    num_output_matrices = 9

    power: float = Field(
        0.15, ge=0, le=MOST_POWER, description="how much the leading directions are raised"
    )
    task_power: float = Field(
        0.0, ge=0, le=MOST_POWER, description="how much models with large changes are raised"
    )
    input_power: float = Field(
        0.0, ge=0, le=MOST_POWER, description="how much inputs that all models use are raised"
    )

    def refusal(self, objective: Objective, num_products: int) -> str | None:  # noqa: ARG002
        if objective.has_output_factors or objective.for_vectors:
            return (
                "essential subspaces are those of outputs, from second moments of inputs, and the "
                f"objective is {objective.name}; use gram"
            )
        return None

    def has_use_for(self, found: Found) -> bool:
        return found.view.seen in ("linear", "conv1d")

    def solve(self, problem: Problem) -> Solution:
        base, weights = problem.load_base(), problem.weights

        def terms() -> Iterator[tuple[Tensor, Tensor]]:
            for (operator, own), weight in zip(problem.load_terms(), weights, strict=True):
                covariance = operator.own if isinstance(operator, Paired) else operator
                change = weight * (own - base)
                yield change, covariance(change) @ change.mT

        powers = self.power, self.task_power, self.input_power
        merged = base + merge_in_subspaces(terms(), len(weights), *powers)
        return rate(problem.system, merged - problem.start, Status.COMPUTED)
