"""Solvers: how far to go from the init towards the solution, and on which way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.limits import MOST_ITERATIONS
from matsmerge.linalg.calibration import calibrate
from matsmerge.linalg.closed_form import solve_diagonal, solve_gram
from matsmerge.linalg.conjugate_gradients import (
    conjugate_gradients,
    jacobi,
    solve_gram_by_iterations,
    solve_kronecker_sum,
)
from matsmerge.linalg.eigenbasis import (
    Decompose,
    decompose,
    dense,
    follow_trajectory,
    is_gram,
    is_worth_it,
    solve_by_flow,
)
from matsmerge.linalg.essential_subspaces import merge_in_subspaces
from matsmerge.linalg.kronecker_sums import is_kronecker_sum, solve_pair
from matsmerge.linalg.operators import Diagonal, Gram, Identity, Operator, Paired
from matsmerge.linalg.system import Limits, Solution, Status, System, rate
from matsmerge.methods.objectives.objective import Found, Objective
from matsmerge.methods.options import Options, table

_MAX_KEPT_ELEMENTS = 1 << 22  # of all residuals of a solution
_ALWAYS_DECOMPOSED = 256  # inputs of a layer whose matrix costs next to nothing to decompose


@dataclass(frozen=True)
class Problem:
    """A system, and what else a solver may want to know of it."""

    system: System
    start: Tensor  # X0
    load_terms: Callable[[], Iterator[tuple[Operator, Tensor]]]  # every model's C_m and W_m
    load_base: Callable[[], Tensor]
    weights: tuple[float, ...]  # of the models, which their C_m have been multiplied by
    held_out: System | None = None
    keep: tuple[int, ...] = ()  # iterations whose iterates are wanted
    stored: torch.dtype = torch.float32  # precision of the statistics
    num_sharing: int = 1  # systems with the same matrix
    decompose: Decompose = decompose


class Solver(Options, ABC):
    """Hyperparameters of a solver, and how to run it."""

    iterates: ClassVar[bool] = False
    needs_base: ClassVar[bool] = False
    for_vectors: ClassVar[bool] = True  # has it a meaning for (IA)^3 and other scales?
    num_output_matrices: ClassVar[int] = 0  # (out, out), that it holds at once

    @property
    def uses_held_out(self) -> bool:
        return False

    @property
    def needs_matrix(self) -> bool:
        """Whether it writes out the covariance of inputs, however that is stored."""
        return False

    def refusal(self, objective: Objective, num_products: int) -> str | None:  # noqa: ARG002
        """Why it cannot solve for an objective with so many operators; None if it can."""
        return None

    def has_use_for(self, found: Found) -> bool:  # noqa: ARG002
        """Whether it does anything to a parameter for which there is that."""
        return True

    @abstractmethod
    def solve(self, problem: Problem) -> Solution: ...


class ConjugateGradients(Solver):
    """Conjugate gradients: each iteration moves further from the init.

    Stopping early is a regulariser towards the init. For Gram matrices all iterates come from one
    eigendecomposition where that is worth it.
    """

    name = "cg"
    iterates = True

    iterations: int = Field(
        20, ge=0, le=MOST_ITERATIONS, description="how many iterations, at most"
    )
    tolerance: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="stop at this relative residual"
    )
    preconditioner: Literal["none", "jacobi", "kronecker"] = Field(
        "none", description="kronecker: the nearest single Kronecker product, for kfac"
    )
    damping: float = Field(
        0.01,
        allow_inf_nan=False,
        gt=0,
        description="of the kronecker preconditioner, relative to its mean eigenvalue",
    )
    stop: Literal["fixed", "held_out"] = Field(
        "fixed", description="held_out: where the objective on held-out statistics is lowest"
    )
    form: Literal["auto", "plain", "eigenbasis"] = Field(
        "auto", description="how to compute iterates of a Gram system; auto: by their cost"
    )

    @property
    def uses_held_out(self) -> bool:
        return self.stop == "held_out"

    @property
    def needs_matrix(self) -> bool:
        return self.form == "eigenbasis"

    def refusal(self, objective: Objective, num_products: int) -> str | None:  # noqa: ARG002
        if self.preconditioner == "kronecker" and not objective.has_output_factors:
            return "the kronecker preconditioner is made of K-FAC factors; use objective kfac"
        return None

    def solve(self, problem: Problem) -> Solution:
        system, held_out = problem.system, problem.held_out
        iterations = max(problem.keep, default=self.iterations)
        limits = Limits(iterations, self.tolerance, problem.keep)
        # Keeping all residuals of a vector costs little.
        is_small = system.residual.numel() * iterations <= _MAX_KEPT_ELEMENTS
        orthogonalize = is_small and self.preconditioner == "none"
        if is_kronecker_sum(system.operator):
            return solve_kronecker_sum(
                system,
                limits,
                preconditioner=self.preconditioner,
                damping=self.damping,
                held_out=held_out,
                stored=problem.stored,
                orthogonalize=orthogonalize,
            )
        is_plain = self.preconditioner == "none"
        if is_plain and self._in_eigenbasis(problem):
            basis = problem.decompose(dense(system.operator), problem.stored)
            return follow_trajectory(system, basis, limits, held_out)
        precondition = torch.clone if is_plain else jacobi(system.operator)
        if is_gram(system.operator):
            return solve_gram_by_iterations(
                system,
                limits,
                precondition=precondition,
                held_out=held_out,
                stored=problem.stored,
                orthogonalize=orthogonalize,
            )
        return conjugate_gradients(
            system,
            limits,
            precondition=precondition,
            held_out=held_out,
            orthogonalize=orthogonalize,
        )

    def _in_eigenbasis(self, problem: Problem) -> bool:
        if not is_gram(problem.system.operator) or self.form == "plain":
            return False
        num_outputs, num_inputs = problem.system.residual.shape[-2:]
        is_small = isinstance(problem.system.operator, Gram) and num_inputs <= _ALWAYS_DECOMPOSED
        return (
            self.form == "eigenbasis"
            or is_small
            or is_worth_it(
                num_outputs,
                num_inputs,
                max(problem.keep, default=self.iterations),
                len(problem.keep),
                problem.num_sharing,
            )
        )


class ClosedForm(Solver):
    """The solution at once; in directions no model has anything for, the init stays.

    Diagonals are divided by, Gram matrices solved by Cholesky in float64 or by their
    pseudo-inverse, K-FAC of two models by diagonalising both at once.
    """

    name = "closed_form"

    def refusal(self, objective: Objective, num_products: int) -> str | None:
        num = num_products + objective.is_anchored
        if objective.has_output_factors and num > 2:
            return (
                f"kfac has no closed form for {num} models, uses of a weight, or anchors: the sum "
                "of more than two Kronecker products cannot be inverted as one; use solver cg with "
                "preconditioner kronecker"
            )
        return None

    def solve(self, problem: Problem) -> Solution:
        operator = problem.system.operator
        if is_kronecker_sum(operator):
            return solve_pair(problem.system, problem.stored)
        if is_gram(operator):
            return solve_gram(problem.system, stored=problem.stored, decomposed=problem.decompose)
        assert isinstance(operator, (Identity, Diagonal)), "no other sum has a closed form"
        return solve_diagonal(problem.system)


class SpectralFilter(Solver):
    """As far as gradient flow gets in some time, in the leading directions of the covariances.

    D = R Q s(Λ) Qᵀ with sum_m C_m = Q Λ Qᵀ and s(λ) = (1 - exp(-λ time)) / λ for the largest
    eigenvalues, else 0: directions with small ones would amplify noise. SWUDI's filter (Wei et
    al., 2026, arXiv:2606.07289). Diagonal covariances, those of embeddings, are divided by.
    """

    name = "spectral_filter"

    time: float = Field(
        300.0,
        allow_inf_nan=False,
        ge=0,
        description="of the gradient flow, for covariances of trace one (wudi, equalize)",
    )
    share: float = Field(0.65, gt=0, le=1, description="of the directions, that are moved in")

    @property
    def needs_matrix(self) -> bool:
        return True

    def refusal(self, objective: Objective, num_products: int) -> str | None:  # noqa: ARG002
        if objective.has_output_factors or objective.for_vectors:
            return (
                "the spectral filter is about eigenvalues of second moments of inputs, and the "
                f"objective is {objective.name}; use gram, or one made from the weights, as wudi"
            )
        return None

    def solve(self, problem: Problem) -> Solution:
        system = problem.system
        if not is_gram(system.operator):
            return solve_diagonal(system)
        basis = problem.decompose(dense(system.operator), problem.stored)
        return solve_by_flow(system, basis, self.time, self.share)


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
    the released code of ESM (Li et al., 2026, arXiv:2606.19164) does for each weight of RoBERTa. It
    then scales each weight by the sizes of others of its kind, which is not done here. For linear
    layers.
    """

    name = "essential_subspaces"
    needs_base = True
    for_vectors = False
    num_output_matrices = 9

    power: float = Field(
        0.15, allow_inf_nan=False, ge=0, description="how much the leading directions are raised"
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

        merged = base + merge_in_subspaces(terms(), len(weights), self.power)
        return rate(problem.system, merged - problem.start, Status.COMPUTED)


SOLVERS: Mapping[str, type[Solver]] = table(
    ConjugateGradients, ClosedForm, SpectralFilter, SingularValueCalibration, EssentialSubspaces
)
