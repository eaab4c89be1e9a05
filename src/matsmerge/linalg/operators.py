"""Symmetric positive semi-definite operators on a parameter in its own shape.

A weight W in torch's layout is (out, in); convolutions with groups are (groups, out, in). Nothing
is flattened, so that the covariance of a whole layer is never written out:

    identity    s X
    diagonal    D * X
    Gram        X G           G (in, in), second moment of inputs
    low rank    s (X Zᵀ) Z    Z (n, in), one row for each example; G = s ZᵀZ
    Kronecker   O X G         O (out, out), second moment of output gradients
    truncated   O X G         O, G known by their leading directions; a Gram is the case O = I

The paper writes W as (in, out), and so the Gram from the left. A sum stays of its own kind where it
can: Gram and Gram is a Gram; Kronecker and Kronecker is not a Kronecker.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matsmerge.linalg.truncated import Factor, Truncated

_ROWS_AT_ONCE = 32


class Operator(ABC):
    """Symmetric positive semi-definite; computes in the precision of what it is applied to."""

    @abstractmethod
    def __call__(self, x: Tensor, /) -> Tensor: ...

    @abstractmethod
    def __mul__(self, scale: float, /) -> "Operator": ...

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Its diagonal, of a shape that goes with the parameter's."""

    def __add__(self, other: "Operator", /) -> "Operator":
        return Sum((*terms_of(self), *terms_of(other)))


@dataclass(frozen=True)
class Identity(Operator):
    """s X: every direction counts the same. Averaging."""

    scale: float = 1.0

    def __call__(self, x: Tensor, /) -> Tensor:
        return x * self.scale

    def __mul__(self, scale: float, /) -> "Identity":
        return Identity(self.scale * scale)

    def __add__(self, other: Operator, /) -> Operator:
        if isinstance(other, Identity):
            return Identity(self.scale + other.scale)
        return super().__add__(other) if isinstance(other, Sum) else other + self

    def diagonal(self) -> Tensor:
        return torch.tensor(self.scale, dtype=torch.float64)


@dataclass(frozen=True)
class Diagonal(Operator):
    """D * X: directions along the axes. Diagonal Fisher merging."""

    values: Tensor  # of the parameter's shape, or one that expands to it

    def __call__(self, x: Tensor, /) -> Tensor:
        return x * self.values.to(x.dtype)

    def __mul__(self, scale: float, /) -> "Diagonal":
        return Diagonal(self.values * scale)

    def __add__(self, other: Operator, /) -> Operator:
        if isinstance(other, Diagonal):
            return Diagonal(self.values + other.values)
        if isinstance(other, Identity):
            return Diagonal(self.values.double() + other.scale)
        return super().__add__(other)

    def diagonal(self) -> Tensor:
        return self.values


@dataclass(frozen=True)
class Gram(Operator):
    """X G: directions among the inputs, the same for every output. RegMean.

    The block of the Fisher information for a vector is one, with the vector as a single row.
    """

    matrix: Tensor  # (in, in) or (groups, in, in)

    def __call__(self, x: Tensor, /) -> Tensor:
        return x @ self.matrix.to(x.dtype)

    def __mul__(self, scale: float, /) -> "Gram":
        return Gram(self.matrix * scale)

    def __add__(self, other: Operator, /) -> Operator:
        if isinstance(other, Gram):
            return Gram(self.matrix + other.matrix)
        if isinstance(other, Identity):
            matrix = self.matrix.double().clone()
            matrix.diagonal(dim1=-2, dim2=-1).add_(other.scale)
            return Gram(matrix)
        return super().__add__(other)

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)


@dataclass(frozen=True)
class LowRank(Operator):
    """s (X Zᵀ) Z: a Gram known by the few rows it is made of, such as per-example gradients."""

    rows: Tensor  # (n, in)
    scale: float = 1.0

    def __call__(self, x: Tensor, /) -> Tensor:
        result = torch.zeros_like(x)
        # A few rows at a time, so that those of another precision are turned in the cache.
        buffer = x.new_empty(min(_ROWS_AT_ONCE, len(self.rows)), self.rows.shape[-1])
        for some in self.rows.split(_ROWS_AT_ONCE):
            rows = buffer[: len(some)].copy_(some)
            result += (x @ rows.mT) @ rows
        return result.mul_(self.scale)

    def __mul__(self, scale: float, /) -> "LowRank":
        return LowRank(self.rows, self.scale * scale)

    def diagonal(self) -> Tensor:
        return (self.rows.double().square().sum(-2) * self.scale).unsqueeze(-2)

    def dense(self) -> Gram:
        rows = self.rows.double()
        return Gram(rows.mT @ rows * self.scale)


@dataclass(frozen=True)
class Kronecker(Operator):
    """O X G: directions among inputs and outputs. K-FAC (Martens & Grosse, 2015).

    An input factor that is diagonal, as that of an embedding, is given as a vector. Each factor is
    a tensor times a number, since products of their sizes may be ones that float32 does not have.
    """

    outputs: Tensor  # (out, out) or (groups, out, out)
    inputs: Tensor  # (in, in), (groups, in, in) or (in,)
    outputs_scale: float = 1.0
    inputs_scale: float = 1.0

    @property
    def scale(self) -> float:
        return self.outputs_scale * self.inputs_scale

    @property
    def trace(self) -> float:
        return trace_of(self.outputs) * trace_of(self.inputs) * self.scale

    def __call__(self, x: Tensor, /) -> Tensor:
        inputs = self.inputs.to(x.dtype)
        image = self.outputs.to(x.dtype) @ (x * inputs if inputs.ndim == 1 else x @ inputs)
        return image if self.scale == 1 else image.mul_(self.scale)

    def __mul__(self, scale: float, /) -> "Kronecker":
        return replace(self, outputs_scale=self.outputs_scale * scale)

    def diagonal(self) -> Tensor:
        inputs = self.inputs
        if inputs.ndim > 1:
            inputs = inputs.diagonal(dim1=-2, dim2=-1)
        outputs = self.outputs.diagonal(dim1=-2, dim2=-1)
        return outputs.double().unsqueeze(-1) * inputs.double().unsqueeze(-2) * self.scale


@dataclass(frozen=True)
class TruncatedProduct(Operator):
    """O X G of factors known by their leading directions; one of them may be a whole matrix.

    Of factors (out, r) and (in, r) it takes 8 out in r operations, and no matrix of their size.
    """

    outputs: Factor  # (out, out)
    inputs: Factor  # (in, in)
    scale: float = 1.0

    def __call__(self, x: Tensor, /) -> Tensor:
        g, o = self.inputs, self.outputs
        image = g.after(x) if isinstance(g, Truncated) else x @ g.to(x.dtype)
        image = o.before(image) if isinstance(o, Truncated) else o.to(x.dtype) @ image
        return image if self.scale == 1 else image.mul_(self.scale)

    def __mul__(self, scale: float, /) -> "TruncatedProduct":
        return replace(self, scale=self.scale * scale)

    def diagonal(self) -> Tensor:
        outputs, inputs = self.outputs.diagonal(), self.inputs.diagonal()
        return outputs.double().unsqueeze(-1) * inputs.double() * self.scale

    @property
    def trace(self) -> float:
        return trace_of(self.outputs) * trace_of(self.inputs) * self.scale


@dataclass(frozen=True)
class Paired(Operator):
    """A covariance of inputs z, and beside it that of [z; δ], for a model that received z + δ.

    As an operator it is the former; `make_system` uses the latter to say where it leads.
    """

    own: Operator
    both: Operator  # on (out, 2 in)

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.own(x)

    def __mul__(self, scale: float, /) -> "Paired":
        return Paired(self.own * scale, self.both * scale)

    def diagonal(self) -> Tensor:
        return self.own.diagonal()


@dataclass(frozen=True)
class Sum(Operator):
    """Operators of kinds whose sum is no longer of that kind."""

    terms: tuple[Operator, ...]

    def __call__(self, x: Tensor, /) -> Tensor:
        result = self.terms[0](x)
        for term in self.terms[1:]:
            result += term(x)
        return result

    def __mul__(self, scale: float, /) -> "Sum":
        return Sum(tuple(term * scale for term in self.terms))

    def diagonal(self) -> Tensor:
        first, *others = (term.diagonal().double() for term in self.terms)
        for other in others:
            first = first + other
        return first

    def kroneckers(self) -> Sequence[Kronecker] | None:
        """The terms, where all of them are Kronecker products."""
        found = [term for term in self.terms if isinstance(term, Kronecker)]
        return found if len(found) == len(self.terms) else None


def terms_of(operator: Operator) -> tuple[Operator, ...]:
    """The terms of a sum, or the one there is."""
    return operator.terms if isinstance(operator, Sum) else (operator,)


def trace_of(factor: Factor) -> float:  # (d, d), (groups, d, d), or a diagonal (d,)
    """The sum of a factor's eigenvalues."""
    if isinstance(factor, Truncated):
        return factor.trace
    diagonal = factor if factor.ndim == 1 else factor.diagonal(dim1=-2, dim2=-1)
    return float(diagonal.double().sum())
