"""Solving a layer's systems, one after the other."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from matsmerge.engine.layers import Layer, Round
from matsmerge.errors import StatisticsError
from matsmerge.linalg.eigenbasis import Eigenbasis, decompose
from matsmerge.linalg.operators import Operator
from matsmerge.linalg.rounding import lowest_by_rounding
from matsmerge.linalg.system import Solution, System, make_system
from matsmerge.methods.mats import name_of
from matsmerge.methods.objectives.kfac import Kfac
from matsmerge.methods.objectives.objective import Evidence, Part
from matsmerge.methods.solvers import Problem
from matsmerge.statistics.statistics import HELD_OUT, MAIN

_NEGATIVE = -0.01  # an eigenvalue below this share of the largest is damage, or coarse rounding
_DIGITS = 7  # of the numbers in a trace

# Reads a parameter of the model with this number, or of the base (None), whole and in float64.
Load = Callable[[int | None, str], Tensor]
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Solved:
    """A layer's merged values, those at the iterations to keep, and what to say about it."""

    values: Values
    kept: Mapping[int, Values]
    reports: dict[str, list[dict[str, Any]]]  # of each parameter


@dataclass(frozen=True)
class LayerSolver:
    """Solves layers of one merge."""

    evidence: tuple[Evidence, ...]
    weights: tuple[float, ...]
    load: Load
    keep: tuple[int, ...] = ()
    num_sharing: int = 1

    def solve(self, layer: Layer, start: Values) -> Solved:
        """Go through all rounds from the values of the init."""
        values, kept = dict(start), {at: dict(start) for at in self.keep}
        reports: dict[str, list[dict[str, Any]]] = {}
        for one in layer.rounds:
            x0 = self._matrix(one, values)
            system = self._system(one, x0, MAIN)
            held_out = None
            if one.stage.solver.uses_held_out:
                held_out = self._system(one, x0, HELD_OUT)
            iterates = one.is_last and one.stage.solver.iterates
            problem = Problem(
                system,
                x0,
                held_out,
                self.keep if iterates else (),
                self._stored(one),
                self.num_sharing,
                _decompositions.get,
            )
            solution = one.stage.solver.solve(problem)
            values |= self._split(one, x0 + solution.correction, values)
            for at in self.keep:
                at_this = x0 + solution.kept[at] if iterates else None
                kept[at] |= (
                    {name: values[name] for name in _touched(one)}
                    if at_this is None
                    else self._split(one, at_this, values)
                )
            reports.setdefault(one.parameter, []).append(describe(one, system, solution))
        return Solved(values, kept, reports)

    def _system(self, one: Round, x0: Tensor, of: str) -> System:
        return make_system(self._terms(one, of), x0)

    def _terms(self, one: Round, of: str) -> Iterator[tuple[Operator, Tensor]]:
        found = one.found
        for number, weight in enumerate(self.weights):
            if weight == 0:
                continue
            own = self._matrix(one, _Loading(self.load, number))

            def load_delta(own: Tensor = own) -> Tensor:
                return own - found.view.matrix(self.load(None, one.parameter))

            evidence = self.evidence[number] if found.keys else None
            part = Part(found.keys[number] if found.keys else (), evidence, of, load_delta)
            operator = one.stage.objective.operator(found, part)
            yield (operator if weight == 1 else operator * weight), own

    def _matrix(self, one: Round, values: "Mapping[str, Tensor] | _Loading") -> Tensor:
        """The parameter as the matrix that the system is about, with its bias where joined."""
        view, bias = one.found.view, one.found.bias
        matrix = view.matrix(values[one.parameter])
        return matrix if bias is None else view.join(matrix, values[bias])

    def _split(self, one: Round, matrix: Tensor, like: Values) -> Values:
        """The parameters of such a matrix."""
        result: Values = {}
        if one.found.bias is not None:
            result[one.found.bias] = matrix[..., -1].reshape(like[one.found.bias].shape)
            matrix = matrix[..., :-1]
        result[one.parameter] = one.found.view.values(matrix, like[one.parameter].shape)
        return result

    def _stored(self, one: Round) -> torch.dtype:
        """The coarsest precision the statistics are stored in."""
        if not one.found.keys:
            return torch.float32
        specs = (s for e in self.evidence for s in e.statistics.arrays.specs.values())
        found = {s.dtype for s in specs if s.dtype.is_floating_point}
        if isinstance(one.stage.objective, Kfac):
            found.add(torch.float32)  # which its factors are rounded to
        return max(found, key=lambda dtype: torch.finfo(dtype).eps)


@dataclass(frozen=True)
class _Loading:
    """A model's parameters, read when they are asked for."""

    load: Load
    model: int

    def __getitem__(self, name: str) -> Tensor:
        return self.load(self.model, name)


def _touched(one: Round) -> set[str]:
    return {one.parameter} | ({one.found.bias} if one.found.bias else set())


class _Decompositions(threading.local):
    """The last eigendecomposition, for the next layer with the same matrix."""

    matrix: Tensor | None = None
    stored: torch.dtype | None = None
    basis: Eigenbasis | None = None

    def get(self, matrix: Tensor, stored: torch.dtype) -> Eigenbasis:
        last, is_same = self.matrix, self.stored == stored
        if self.basis is not None and last is not None and is_same and torch.equal(last, matrix):
            return self.basis
        basis = decompose(matrix, stored)
        if basis.lowest < min(_NEGATIVE, lowest_by_rounding(stored)):
            raise StatisticsError(
                f"a covariance has the eigenvalue {basis.lowest:.2g} relative to its largest: it "
                "is not a second moment. The statistics are damaged; collect them again"
            )
        self.matrix, self.stored, self.basis = matrix, stored, basis
        return basis


_decompositions = _Decompositions()


def describe(one: Round, system: System, solution: Solution) -> dict[str, Any]:
    """What a solution is worth, plain enough for merge.json."""
    trace = solution.trace
    return {
        "stage": one.number,
        "objective": name_of("objective", one.stage.objective),
        "solver": name_of("solver", one.stage.solver),
        "status": solution.status.name.lower(),
        "iterations": solution.iterations,
        "residual": _rounded(solution.residual),
        "objective_value": _rounded(solution.objective),
        "objective_of_start": _rounded(system.objective),
        **({"joined": one.found.bias} if one.found.bias else {}),
        **({"residuals": _all_rounded(trace.residuals)} if trace.residuals else {}),
        **({"objective_values": _all_rounded(trace.objectives)} if trace.objectives else {}),
        **({"held_out_values": _all_rounded(trace.held_out)} if trace.held_out else {}),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _all_rounded(values: Sequence[float]) -> list[float]:
    return [_rounded(value) for value in values]
