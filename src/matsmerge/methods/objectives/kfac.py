"""The block Fisher information of a layer, by K-FAC."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from matsmerge.linalg.kronecker_sums import scales_of
from matsmerge.linalg.operators import Kronecker, Operator, Paired, Sum
from matsmerge.linalg.rounding import to_unit_size, without_rounding
from matsmerge.methods.objectives.gram import Gram, ridge_of, with_corner
from matsmerge.methods.objectives.objective import Found, Part
from matsmerge.statistics.statistics import Map


class Kfac(Gram):
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

    def _is_covered(self, m: Map) -> bool:
        return super()._is_covered(m) and (m.outputs or m.layout == "norm")

    def operator(self, found: Found, part: Part) -> Operator:
        assert part.evidence is not None
        statistics = part.evidence.statistics
        terms, paired = [], []
        for m in map(statistics.map_of, part.keys):
            if m.layout == "norm":  # features are apart, and count alike
                given = torch.ones(found.view.num_groups, 1, 1)
            else:
                given = statistics.output_factor(m.module, part.of)
            outputs, size_o = to_unit_size(given)
            inputs, size_g = to_unit_size(self.adjusted(statistics, m, found, part.of))
            if self.per == "token":
                counts = statistics.header.sets[part.of]
                size_o *= counts.num_examples / counts.num_rows[f"inputs/{m.inputs}"]
            ridge = ridge_of(outputs, self.ridge + self.output_ridge)
            factor = without_rounding(outputs, given.dtype, ridge)
            moment = without_rounding(inputs, given.dtype, ridge_of(inputs, self.ridge))
            terms.append(Kronecker(factor, moment, size_o, size_g))
            pairs = statistics.pairs(m.module, part.of, bias=found.bias is not None)
            if pairs is not None:
                both = with_corner(pairs.double() / size_g, moment)
                paired.append(Kronecker(factor, both, size_o, size_g))
        operator = _sum(terms)
        if paired:
            operator = Paired(operator, _sum(paired))
        if not self.equalize:
            return operator
        return operator * (1 / (sum(scales_of(terms)) or 1.0))


def _sum(terms: Sequence[Kronecker]) -> Operator:
    return terms[0] if len(terms) == 1 else Sum(tuple(terms))
