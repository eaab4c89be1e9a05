"""Solving a layer's systems, one after the other."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from matsmerge.errors import StatisticsError
from matsmerge.linalg.eigenbasis import Eigenbasis, decompose
from matsmerge.linalg.operators import Operator
from matsmerge.linalg.rounding import may_be_second_moment
from matsmerge.linalg.system import Solution, System, make_system
from matsmerge.methods.layer import LayerWork, Round
from matsmerge.methods.objectives.objective import Part
from matsmerge.methods.site import MergedSite
from matsmerge.methods.solver import Problem
from matsmerge.statistics.statistics import HELD_OUT, MAIN

_DIGITS = 7  # of the numbers in a trace

LayerValues = dict[str, Tensor]


@dataclass(frozen=True)
class LayerSolver:
    """Solves one layer of a merge.

    For models that are `held` the values of the init stand in the place of their own: sum_m C_m(X)
    = sum_m C_m(W_m), with W_m = X0. Their covariances say where the init is kept.
    """

    work: LayerWork
    held: AbstractSet[str] = frozenset()

    def solve(self, start: LayerValues) -> MergedSite:
        """Go through all rounds from the values of the init, whole and in float64."""
        values, kept = dict(start), {at: dict(start) for at in self.work.keep}
        reports: dict[str, list[dict[str, Any]]] = {}
        for one in self.work.layer.rounds:
            x0 = _matrix(one, values.__getitem__)
            terms = partial(self._terms, one, _matrix(one, start.__getitem__))
            system = one.stage.objective.anchored(make_system(terms(MAIN), x0))
            held_out = None
            if one.stage.solver.uses_held_out:
                held_out = make_system(terms(HELD_OUT), x0)
            iterates = one.is_last and one.stage.solver.iterates
            problem = Problem(
                system,
                x0,
                partial(terms, MAIN),
                partial(self._base, one),
                tuple(t.weight for t in self.work.sites[one.parameter].tasks if t.weight != 0),
                held_out,
                self.work.keep if iterates else (),
                self._stored(one),
                self.work.num_sharing,
                _decompositions.get,
            )
            solution = one.stage.solver.solve(problem)
            values |= _split(one, x0 + solution.correction, values)
            for at in self.work.keep:
                kept[at] |= (
                    _split(one, x0 + solution.kept[at], values)
                    if iterates
                    else {name: values[name] for name in one.parameters}
                )
            reports.setdefault(one.parameter, []).append(describe_solution(one, system, solution))
        return MergedSite(values, kept, reports)

    def _terms(self, one: Round, init: Tensor, of: str) -> Iterator[tuple[Operator, Tensor]]:
        """Every model's covariance and weights."""
        found, evidence = one.found, self.work.evidence
        for number, task in enumerate(self.work.sites[one.parameter].tasks):
            if task.weight == 0:
                continue
            own = _matrix(one, lambda name, number=number: self._load(name, number))  # type: ignore[misc]

            def load_delta(own: Tensor = own) -> Tensor:
                return own - found.view.matrix(self._load(one.parameter, None))

            part = Part(
                found.keys[number] if found.keys else (),
                evidence[number] if found.keys else None,
                of,
                load_delta,
            )
            operator = one.stage.objective.operator(found, part)
            target = init if task.model in self.held else own
            counts = task.weight * task.shares.importance
            yield (operator if counts == 1 else operator * counts), target

    def _base(self, one: Round) -> Tensor:
        return _matrix(one, lambda name: self._load(name, None))

    def _load(self, name: str, model: int | None) -> Tensor:
        """A parameter of a model, or of the base (None), whole and in float64."""
        site = self.work.sites[name]
        flat = site.load_base() if model is None else site.tasks[model].load()
        return flat.double().view(site.shape)

    def _stored(self, one: Round) -> torch.dtype:
        """The coarsest precision the statistics are stored in."""
        if not one.found.keys:
            return torch.float32
        # Rounding a sketch turns its directions a little, but gives it no others.
        found = {
            spec.dtype
            for statistics in (other.statistics for other in self.work.evidence)
            for name, spec in statistics.arrays.specs.items()
            if statistics.header.forms.get(name) not in ("sketch", "full")
        } or {torch.float32}
        if one.stage.objective.has_output_factors:
            found.add(torch.float32)  # which its factors are rounded to
        return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def _matrix(one: Round, load: Callable[[str], Tensor]) -> Tensor:
    """The parameter as the matrix that the system is about, with its bias where joined."""
    view, bias = one.found.view, one.found.bias
    matrix = view.matrix(load(one.parameter))
    return matrix if bias is None else view.join(matrix, load(bias))


def _split(one: Round, matrix: Tensor, like: Mapping[str, Tensor]) -> LayerValues:
    """The parameters of such a matrix."""
    result: LayerValues = {}
    if one.found.bias is not None:
        result[one.found.bias] = matrix[..., -1].reshape(like[one.found.bias].shape)
        matrix = matrix[..., :-1]
    result[one.parameter] = one.found.view.values(matrix, like[one.parameter].shape)
    return result


class _Decompositions(threading.local):
    """The last eigendecomposition, for the next layer with the same matrix."""

    matrix: Tensor | None = None
    stored: torch.dtype | None = None
    basis: Eigenbasis | None = None

    def get(self, matrix: Tensor, stored: torch.dtype) -> Eigenbasis:
        last, basis = self.matrix, self.basis
        is_like = last is not None and (self.stored, last.device) == (stored, matrix.device)
        if is_like and basis is not None and last is not None and torch.equal(last, matrix):
            return basis
        basis = decompose(matrix, stored)
        if not may_be_second_moment(basis.lowest, stored):
            raise StatisticsError(
                f"a covariance has the eigenvalue {basis.lowest:.2g} relative to its largest: it "
                "is not a second moment. The statistics are damaged; collect them again"
            )
        self.matrix, self.stored, self.basis = matrix, stored, basis
        return basis


_decompositions = _Decompositions()


def describe_solution(one: Round, system: System, solution: Solution) -> dict[str, Any]:
    """What a solution is worth, plain enough for merge.json."""
    trace = solution.trace
    return {
        "stage": one.number,
        "objective": one.stage.objective.name,
        "solver": one.stage.solver.name,
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
