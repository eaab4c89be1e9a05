"""What a solver is: how far to go from the init towards the solution, and on which way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from matsmerge.linalg.eigenbasis import Decompose, decompose
from matsmerge.linalg.operators import Operator
from matsmerge.linalg.system import Solution, System
from matsmerge.linalg.task_subspaces import fills_space, in_full, is_truncated
from matsmerge.methods.objectives.objective import Found, Objective
from matsmerge.methods.options import Options


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

    def in_simplest_form(self) -> "Problem":
        """The same, with whole matrices in place of truncated ones that leave nothing out."""
        operator, shape = self.system.operator, self.system.residual.shape
        if not (is_truncated(operator) and fills_space(operator, shape)):
            return self
        system, held_out = (
            None if s is None else replace(s, operator=in_full(s.operator, shape))
            for s in (self.system, self.held_out)
        )
        assert system is not None
        return replace(self, system=system, held_out=held_out)


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
