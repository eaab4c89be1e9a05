"""Second moments of a layer's inputs."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.errors import StatisticsError
from matsmerge.linalg.kronecker_sums import hold
from matsmerge.linalg.operators import (
    Diagonal,
    Gram,
    Operator,
    Paired,
    Sum,
    TruncatedProduct,
    trace_of,
)
from matsmerge.linalg.system import System
from matsmerge.linalg.truncated import Truncated, isotropic
from matsmerge.methods.objectives.fisher import check_everyone_has, check_shapes
from matsmerge.methods.objectives.objective import Evidence, Found, Objective, Part, Subject, View
from matsmerge.statistics.statistics import MAIN, Map


class GramObjective(Objective):
    """C_m(X) = X G_m, G_m = mean of z zᵀ over input rows z: match the layer's outputs.

    The paper, in its layout (in, out): G_m = 1/N Z_mᵀ Z_m, sum_m G_m W = sum_m G_m W_m. RegMean
    (Jin et al., 2023) scales what is off the diagonal, so that it can be inverted.
    """

    name = "gram"
    statistic: ClassVar[str | None] = "gram"
    uses_inputs = True
    for_vectors = False

    off_diagonal: float = Field(
        1.0,
        allow_inf_nan=False,
        ge=0,
        le=1,
        description="factor on what is off the diagonal, RegMean's lambda",
    )
    ridge: float = Field(
        0.0,
        allow_inf_nan=False,
        ge=0,
        description="added to the diagonal (of both factors), relative to its mean: averages more",
    )
    bias: bool = Field(False, description="join each bias to its weight, as the input 1's column")
    embeddings: bool = Field(False, description="merge embeddings by how often tokens occur")
    norms: bool = Field(
        False,
        description="match the outputs of norms too, feature by feature, along the merged model",
    )
    equalize: bool = Field(
        False, description="give all models' covariances of a layer the same trace"
    )
    anchor: float = Field(
        0.0,
        allow_inf_nan=False,
        ge=0,
        description="how strongly the init holds on, relative to the system's mean eigenvalue",
    )

    def find(self, subject: Subject) -> Found | None:
        maps = [
            [m for m in one.maps_of(subject.parameter) if self._is_covered(m) and one.has_inputs(m)]
            for one in subject.evidence
        ]
        check_everyone_has(str(self.statistic), subject, [bool(m) for m in maps])
        if not all(maps):
            return None
        return found_in_maps(subject, maps, bias=self.bias)

    def _is_covered(self, m: Map) -> bool:
        wanted = {"embedding": self.embeddings, "norm": self.norms}
        return m.inputs is not None and wanted.get(m.layout, True)

    def operator(self, found: Found, part: Part) -> Operator:
        """The mean over all rows, where a weight is used by several modules."""
        assert part.evidence is not None
        statistics = part.evidence.statistics
        maps = [statistics.map_of(module) for module in part.keys]
        rows = [statistics.header.sets[part.of].num_rows[f"inputs/{m.inputs}"] for m in maps]
        has_bias = found.bias is not None
        known = [statistics.truncated_gram(m.module, part.of, bias=has_bias) for m in maps]
        truncated = [moment for moment in known if moment is not None]
        if truncated:
            return self._truncated_operator(found, truncated, [num / sum(rows) for num in rows])
        total = both = torch.zeros((), dtype=torch.float64)
        are_paired = True
        for m, num in zip(maps, rows, strict=True):
            moment = self.scaled(statistics.gram(m.module, part.of, bias=has_bias).double())
            diagonal = moment if moment.ndim == 1 else moment.diagonal(dim1=-2, dim2=-1)
            diagonal += ridge_of(moment, self.ridge).unsqueeze(-1)
            total = total + moment * (num / sum(rows))
            pairs = statistics.pairs(m.module, part.of, bias=has_bias)
            are_paired = are_paired and pairs is not None
            both = both if pairs is None else both + pairs.double() * (num / sum(rows))
        if found.view.is_vector and found.num_inputs > 1:  # features count alike, and apart
            apart = torch.eye(found.num_inputs, dtype=torch.float64, device=total.device)
            total, both = weighed(total, apart), weighed(both, apart)
        trace = trace_of(total) or 1.0
        if self.equalize:
            total /= trace
            both = both / trace
        if found.view.seen == "embedding":
            return Diagonal(total)
        operator = Gram(total)
        return Paired(operator, Gram(with_corner(both, total))) if are_paired else operator

    def _truncated_operator(
        self, found: Found, moments: Sequence[Truncated], shares: Sequence[float]
    ) -> Operator:
        """The same, of moments that are known by their leading directions."""
        outputs = isotropic(found.num_outputs, device=moments[0].device)
        raised = [moment.raised(self.ridge * moment.mean) for moment in moments]
        size = sum(s * m.trace for m, s in zip(raised, shares, strict=True)) or 1.0
        terms: list[Operator] = []
        for moment, share in zip(raised, shares, strict=True):
            scale = share / size if self.equalize else share
            terms.append(TruncatedProduct(outputs, moment, scale * self.off_diagonal))
            if self.off_diagonal != 1:
                left = moment.diagonal() * (scale * (1 - self.off_diagonal))
                terms.append(Diagonal(left.unsqueeze(0)))
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    @property
    def merges_norms(self) -> bool:
        return self.norms

    @property
    def is_anchored(self) -> bool:
        return self.anchor > 0

    def anchored(self, system: System) -> System:
        return hold(system, self.anchor)

    def scaled(self, gram: Tensor) -> Tensor:  # (..., d, d), or a diagonal (d,)
        """A second moment, of which what is off its diagonal is scaled in place."""
        if self.off_diagonal != 1 and gram.ndim > 1:
            diagonal = gram.diagonal(dim1=-2, dim2=-1)
            kept = diagonal.clone()
            gram *= self.off_diagonal
            diagonal.copy_(kept)
        return gram


def ridge_of(moment: Tensor, ridge: float) -> Tensor:  # (..., d, d) -> (...), or a diagonal (d,)
    """What is added to a moment's diagonal, so that it has a little of every direction."""
    diagonal = moment if moment.ndim == 1 else moment.diagonal(dim1=-2, dim2=-1)
    return ridge * diagonal.double().mean(-1)


def weighed(moment: Tensor, metric: Tensor) -> Tensor:  # (d, d) or (2 d, 2 d), and (d, d)
    """The second moment of features, each scaled by itself, whose errors a metric weighs.

    With Z the diagonal matrix of a row z, x z = Z x, so that E[Z O Z] is E[z zᵀ] times O, entry by
    entry. Of [z; δ] it is so for each of the four parts.
    """
    d = len(metric)
    if not moment.ndim:  # there is none
        return moment
    num = moment.shape[-1] // d
    parts = moment.view(num, d, num, d) * metric[None, :, None, :]
    return parts.view(moment.shape)


def with_corner(pairs: Tensor, moment: Tensor) -> Tensor:  # (..., 2 d, 2 d) and (..., d, d)
    """The second moment of [z; δ] with what an objective has made of that of z."""
    d = moment.shape[-1]
    pairs[..., :d, :d] = moment
    return pairs


def found_in_maps(subject: Subject, maps: Sequence[Sequence[Map]], *, bias: bool) -> Found:
    """What linear maps, at least one of each model, say of a weight."""
    layouts = {m.layout for own in maps for m in own}
    if len(layouts) > 1:
        raise StatisticsError(
            f"'{subject.parameter}' is used in different ways by the models: "
            f"{', '.join(sorted(layouts))}; leave it out with an override"
        )
    layout = layouts.pop()
    view, num_outputs, num_inputs = _shape_of(subject, maps, layout)
    joined = _joined_bias(subject, maps) if bias and layout != "embedding" else None
    if joined is not None:
        num_inputs += 1
    specs = [one.statistics.arrays.specs for one in subject.evidence]
    return Found(
        view,
        num_outputs,
        num_inputs,
        tuple(tuple(m.module for m in own) for own in maps),
        joined,
        sum(
            spec[f"{MAIN}/inputs/{m.inputs}"].num_bytes
            for spec, own in zip(specs, maps, strict=True)
            for m in own
        ),
        layout != "embedding",
        (*(tuple(m.inputs for m in own) for own in maps), joined is not None, layout),
        _rank_of(subject, [[f"inputs/{m.inputs}" for m in own] for own in maps]),
        None
        if layout == "embedding"  # whose output factors are made whole
        else _rank_of(subject, [[f"outputs/{m.module}" for m in own if m.outputs] for own in maps]),
    )


def _rank_of(subject: Subject, keys: Sequence[Sequence[str]]) -> int | None:
    """How many columns sketches have together; None if there is anything else."""
    rank = 0
    for one, own in zip(subject.evidence, keys, strict=True):
        for key in own:
            if not one.has_sketch(key):
                return None
            rank += one.statistics.arrays.specs[f"{MAIN}/{key}"].shape[1] - 1
    return rank


def _shape_of(
    subject: Subject, maps: Sequence[Sequence[Map]], layout: str
) -> tuple[View, int, int]:
    """How to see a weight, from its shape and that of its second moment."""
    shape = subject.shape
    key = f"inputs/{maps[0][0].inputs}"
    first = subject.evidence[0].statistics.arrays.specs[f"{MAIN}/{key}"]
    is_elementwise = layout in ("norm", "scale")
    is_vector = layout == "scale" and len(first.shape) == 1 + subject.evidence[0].has_sketch(key)
    is_grouped = (layout == "conv2d" or is_elementwise) and len(first.shape) == 2
    has_groups = is_grouped and not subject.evidence[0].has_sketch(key)
    num_groups = first.shape[0] if has_groups else 1
    if is_vector:  # all features at once, as the one row of a matrix
        num_inputs, num_outputs = math.prod(shape), 1
    elif is_elementwise:
        num_inputs = num_outputs = 1
    elif layout in ("conv1d", "embedding"):
        num_inputs, num_outputs = shape
    else:
        num_outputs, num_inputs = shape[0] // num_groups, math.prod(shape[1:])
    groups = (num_groups,) if num_groups > 1 else ()
    for one, own in zip(subject.evidence, maps, strict=True):
        alone = Subject(subject.parameter, shape, subject.view, (one,))
        for m in own:
            key = f"inputs/{m.inputs}"
            # Sketches are of inputs with a constant 1, where the mean is kept for biases.
            dim = num_inputs + (one.has_sketch(key) and one.statistics.has(f"mean/{m.inputs}"))
            wanted = (dim,) if layout == "embedding" else _stored_shape(one, key, dim)
            check_shapes(alone, [key], (*groups, *wanted))
            if m.outputs:
                key = f"outputs/{m.module}"
                dim = num_inputs if is_vector else num_outputs
                check_shapes(alone, [key], (*groups, *_stored_shape(one, key, dim)))
    return View(layout, num_groups), num_outputs, num_inputs  # type: ignore[arg-type]


def _stored_shape(evidence: Evidence, key: str, dim: int) -> tuple[int, ...]:
    """The shape in which a second moment (dim, dim) is stored: a triangle, or a sketch."""
    if not evidence.has_sketch(key):
        return (dim * (dim + 1) // 2,)
    return dim, evidence.statistics.arrays.specs[f"{MAIN}/{key}"].shape[-1]


def _joined_bias(subject: Subject, maps: Sequence[Sequence[Map]]) -> str | None:
    """The parameter that is the bias of all of a weight's maps, under its shared name."""
    names = set()
    problems = []
    for one, own in zip(subject.evidence, maps, strict=True):
        names |= {one.shared.get(m.bias) if m.bias else None for m in own}
        problems += [
            f"{one.label}: the mean input of '{m.module}' was not kept, which joining its bias "
            "needs; collect without --no-bias, or merge without joined biases"
            for m in own
            if m.bias and not one.statistics.has(f"mean/{m.inputs}")
        ]
    if len(names) != 1 or None in names:
        return None
    if problems:
        raise StatisticsError(problems)
    return names.pop()
