"""Solvers: how far to go from the init towards the solution, and on which way."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from matsmerge.limits import MOST_ITERATIONS
from matsmerge.linalg.closed_form import solve_diagonal, solve_gram, solve_gram_in_float32
from matsmerge.linalg.conjugate_gradients import (
    conjugate_gradients,
    jacobi,
    solve_gram_by_iterations,
    solve_kronecker_sum,
)
from matsmerge.linalg.eigenbasis import (
    dense,
    follow_trajectory,
    is_gram,
    is_worth_it,
    solve_by_flow,
)
from matsmerge.linalg.kronecker_sums import is_kronecker_sum, solve_pair
from matsmerge.linalg.operators import Diagonal, Gram, Identity
from matsmerge.linalg.subspace_solutions import (
    flow_apart,
    iterate_apart,
    solve_apart,
    solve_beside_diagonal,
)
from matsmerge.linalg.system import Limits, Solution
from matsmerge.linalg.task_subspaces import falls_apart, in_full, is_truncated
from matsmerge.methods.merge_steps import EssentialSubspaces, SingularValueCalibration
from matsmerge.methods.objectives.objective import Objective
from matsmerge.methods.options import by_name
from matsmerge.methods.solver import Problem, Solver

_MAX_KEPT_ELEMENTS = 1 << 22  # of all residuals of a solution
_ALWAYS_DECOMPOSED = 256  # inputs of a layer whose matrix costs next to nothing to decompose


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
        problem = problem.in_simplest_form()
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
        if falls_apart(system.operator) and self.preconditioner != "jacobi":
            return iterate_apart(
                system,
                limits,
                preconditioner=self.preconditioner,
                damping=self.damping,
                held_out=held_out,
                stored=problem.stored,
                max_kept=_MAX_KEPT_ELEMENTS,
            )
        if is_plain and self._in_eigenbasis(problem):
            basis = problem.decompose(dense(system.operator), problem.stored)
            return follow_trajectory(system, basis, limits, held_out)
        precondition = torch.clone if is_plain else jacobi(system.operator)
        if is_gram(system.operator) or is_truncated(system.operator):
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

    precision: Literal["float64", "float32"] = Field(
        "float64", description="float32: Gram matrices are inverted as RegMean's own code does it"
    )

    def refusal(self, objective: Objective, num_products: int) -> str | None:
        if self.precision == "float32" and objective.has_output_factors:
            return f"precision float32 is for Gram matrices, the objective is {objective.name}"
        num = num_products + objective.is_anchored
        if objective.has_output_factors and num > 2:
            return (
                f"kfac has no closed form for {num} models, uses of a weight, or anchors: the sum "
                "of more than two Kronecker products cannot be inverted as one; use solver cg with "
                "preconditioner kronecker"
            )
        return None

    def solve(self, problem: Problem) -> Solution:
        problem = problem.in_simplest_form()
        operator = problem.system.operator
        if falls_apart(operator):
            return solve_apart(problem.system, problem.stored)
        if is_truncated(operator):
            return solve_beside_diagonal(problem.system)
        if is_kronecker_sum(operator):
            return solve_pair(problem.system, problem.stored)
        if is_gram(operator) and self.precision == "float32":
            return solve_gram_in_float32(problem.system, problem.start)
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
        system = problem.in_simplest_form().system
        if falls_apart(system.operator):
            return flow_apart(system, self.time, self.share, problem.stored)
        if is_truncated(system.operator):
            system = replace(system, operator=in_full(system.operator, system.residual.shape))
        if not is_gram(system.operator):
            return solve_diagonal(system)
        basis = problem.decompose(dense(system.operator), problem.stored)
        return solve_by_flow(system, basis, self.time, self.share)


SOLVERS: Mapping[str, type[Solver]] = by_name(
    ConjugateGradients, ClosedForm, SpectralFilter, SingularValueCalibration, EssentialSubspaces
)
