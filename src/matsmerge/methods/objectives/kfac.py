"""The block Fisher information of a layer, by K-FAC."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.linalg.operators import (
    Gram,
    Kronecker,
    Operator,
    Paired,
    Sum,
    TruncatedProduct,
    trace_of,
)
from matsmerge.linalg.rounding import to_unit_size, without_rounding
from matsmerge.linalg.truncated import Factor, Truncated
from matsmerge.methods.objectives.gram import GramObjective, ridge_of, weighed, with_corner
from matsmerge.methods.objectives.objective import Found, Part, Subject
from matsmerge.statistics.statistics import MAIN, Map, Statistics


class Kfac(GramObjective):
    """C_m(X) = O_m X G_m, G_m second moment of inputs, O_m of gradients at outputs.

    The paper's block-diagonal Fisher merging, in its layout (in, out): G_m W O_m. K-FAC (Martens &
    Grosse, 2015); several uses of a weight are a product each. A ridge is added to both factors,
    as K-FAC is damped in optimization.
    """

    name = "kfac"
    statistic = "kfac"
    has_output_factors = True

    per: Literal["example", "token"] = Field(
        "example",
        description="what O is a mean over: examples, whose rows are summed, or rows as in the "
        "paper's code, where models with long examples count less",
    )

    output_ridge: float = Field(
        0.0,
        allow_inf_nan=False,
        ge=0,
        description="a further ridge, on O alone: outputs count more alike",
    )
    joint_rank: int = Field(
        512,
        ge=1,
        description="leading directions that are used of all models' sketches together, of layers "
        "that are wider; more take longer",
    )

    def find(self, subject: Subject) -> Found | None:
        found = super().find(subject)
        if found is None:
            return None
        outputs = [
            one.statistics.arrays.specs.get(f"{MAIN}/outputs/{module}")
            for one, modules in zip(subject.evidence, found.keys, strict=True)
            for module in modules
        ]  # norms have none
        return replace(
            found,
            num_bytes=found.num_bytes + sum(s.num_bytes for s in outputs if s),
            input_rank=self._within(found.input_rank, found.num_inputs),
            output_rank=self._within(found.output_rank, found.num_outputs),
        )

    def _within(self, rank: int | None, dim: int) -> int | None:
        return rank if rank is None or dim <= self.joint_rank else min(rank, self.joint_rank)

    def _leading(self, moment: Truncated, found: Found) -> Truncated:
        """A model's share of the directions that are used of all."""
        if moment.dim <= self.joint_rank:
            return moment
        return moment.leading(max(1, self.joint_rank // len(found.keys)))

    def _is_covered(self, m: Map) -> bool:
        return super()._is_covered(m) and (m.outputs or m.layout == "norm")

    @property
    def for_features(self) -> "Kfac":
        return KfacOfScales(**{option: getattr(self, option) for option in Kfac.model_fields})

    def operator(self, found: Found, part: Part) -> Operator:
        assert part.evidence is not None
        statistics = part.evidence.statistics
        terms, paired = [], []
        for m in map(statistics.map_of, part.keys):
            given = self._output_moment(statistics, m, found, part.of)
            stored = given.dtype if isinstance(given, Tensor) else torch.float32
            outputs, size_o = _regular(given, stored, self.ridge + self.output_ridge)
            moment = self._input_moment(statistics, m, found, part.of)
            inputs, size_g = _regular(moment, stored, self.ridge)
            if self.per == "token":
                counts = statistics.header.sets[part.of]
                size_o *= counts.num_examples / counts.num_rows[f"inputs/{m.inputs}"]
            terms.append(_product(outputs, inputs, size_o, size_g))
            pairs = statistics.pairs(m.module, part.of, bias=found.bias is not None)
            if pairs is not None:
                assert isinstance(inputs, Tensor), "inputs in a merged model are not truncated"
                both = with_corner(pairs.double() / size_g, inputs)
                paired.append(_product(outputs, both, size_o, size_g))
        operator = _sum(terms)
        if paired:
            operator = Paired(operator, _sum(paired))
        if not self.equalize:
            return operator
        return operator * (1 / (sum(term.trace for term in terms) or 1.0))

    def _output_moment(self, statistics: Statistics, m: Map, found: Found, of: str) -> Factor:
        if m.layout == "norm":  # features are apart, and count alike
            return torch.ones(found.view.num_groups, 1, 1, device=statistics.device)
        truncated = statistics.truncated_output_factor(m.module, of)
        if truncated is None:
            return statistics.output_factor(m.module, of)
        # The other factor of an embedding is a diagonal, which goes with a matrix.
        is_whole = truncated.is_whole or m.layout == "embedding"
        return truncated.dense() if is_whole else self._leading(truncated, found)

    def _input_moment(self, statistics: Statistics, m: Map, found: Found, of: str) -> Factor:
        """A whole matrix if all directions are known, or what is off its diagonal is scaled."""
        has_bias = found.bias is not None
        truncated = statistics.truncated_gram(m.module, of, bias=has_bias)
        if truncated is None:
            return self.scaled(statistics.gram(m.module, of, bias=has_bias).double())
        is_whole = truncated.is_whole or self.off_diagonal != 1
        return self.scaled(truncated.dense()) if is_whole else self._leading(truncated, found)


class KfacOfScales(Kfac):
    """C_m(x) = (O_m ∘ G_m) x for a vector of (IA)^3, ∘ entry by entry.

    G_m is the second moment of the features z that x scales, O_m that of gradients at x z. With Z
    the diagonal matrix of z, errors Z (x - x_m) in the metric O_m are E[Z O_m Z] = O_m ∘ G_m.
    """

    name = "kfac_scales"
    has_output_factors = False  # the product is one matrix, and the system has a closed form
    for_vectors = True

    def _is_covered(self, m: Map) -> bool:
        return super()._is_covered(m) and m.layout == "scale"

    @property
    def needs_own_statistics(self) -> bool:
        return True

    def operator(self, found: Found, part: Part) -> Operator:  # noqa: ARG002
        assert part.evidence is not None
        statistics = part.evidence.statistics
        counts = statistics.header.sets[part.of]
        total = both = torch.zeros((), dtype=torch.float64)
        are_paired = True
        for m in map(statistics.map_of, part.keys):
            metric = statistics.output_factor(m.module, part.of).double()
            metric.diagonal().add_(ridge_of(metric, self.ridge + self.output_ridge))
            if self.per == "token":
                metric *= counts.num_examples / counts.num_rows[f"inputs/{m.inputs}"]
            moment = self.scaled(statistics.gram(m.module, part.of).double())
            moment.diagonal().add_(ridge_of(moment, self.ridge))
            total = total + weighed(moment, metric)
            pairs = statistics.pairs(m.module, part.of)
            are_paired = are_paired and pairs is not None
            if pairs is not None:
                both = both + weighed(with_corner(pairs.double(), moment), metric)
        scale = 1 / (trace_of(total) or 1.0) if self.equalize else 1.0
        own = Gram(total * scale)
        return Paired(own, Gram(both * scale)) if are_paired else own


def _regular(moment: Factor, stored: torch.dtype, ridge: float) -> tuple[Factor, float]:
    """A factor of size one without rounding, plus a ridge; and what it was divided by."""
    if isinstance(moment, Truncated):
        size = 2.0 ** math.frexp(moment.trace)[1]
        one = moment * (1 / size)
        return one.without_rounding(ridge * one.mean), size
    unit, size = to_unit_size(moment)
    return without_rounding(unit, stored, ridge_of(unit, ridge)), size


def _product(
    outputs: Factor, inputs: Factor, size_o: float, size_g: float
) -> Kronecker | TruncatedProduct:
    if isinstance(outputs, Tensor) and isinstance(inputs, Tensor):
        return Kronecker(outputs, inputs, size_o, size_g)
    return TruncatedProduct(outputs, inputs, size_o * size_g)


def _sum(terms: Sequence[Operator]) -> Operator:
    return terms[0] if len(terms) == 1 else Sum(tuple(terms))
