"""Systems of products whose factors are known by their leading directions, which fall apart.

    C_m(D) = O_m D G_m,  G_m = U_m S_m U_mᵀ + g_m (1 - U_m U_mᵀ),  O_m likewise: V_m, T_m, o_m

With U an orthonormal basis of all U_m (R columns, at most as many as they have together) and V of
all V_m (R'), every C_m maps each of four parts of D to itself:

    inner    VᵀDU              sum_m (VᵀO_mV) X (UᵀG_mU)     a small sum of Kronecker products
    left     VᵀD(1 - UUᵀ)      (sum_m g_m VᵀO_mV) X          one matrix, from the left
    right    (1 - VVᵀ)DU       X (sum_m o_m UᵀG_mU)          one matrix, from the right
    rest     all else          (sum_m o_m g_m) X             a weighted mean

The bases are turned so that the matrices of `left` and `right` are diagonal. There a row of `left`,
a column of `right` and all of `rest` only ever become longer or shorter, also in every iterate of
conjugate gradients: each is one number. So the whole system has (R' + 1) (R + 1) unknowns, those
of `inner` and a border. For a Gram, O = 1, there is the border alone, and the system is diagonal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matsmerge.linalg.operators import (
    Diagonal,
    Gram,
    Identity,
    Kronecker,
    Operator,
    Sum,
    TruncatedProduct,
    terms_of,
    trace_of,
)
from matsmerge.linalg.rounding import is_regular, relative_rounding, rounding_level
from matsmerge.linalg.system import inner as inner_product
from matsmerge.linalg.truncated import Factor, Truncated, isotropic


def is_truncated(operator: Operator) -> bool:
    return any(isinstance(term, TruncatedProduct) for term in terms_of(operator))


def falls_apart(operator: Operator) -> bool:
    """Is it a sum of products alone?"""
    is_diagonal = any(isinstance(term, Diagonal) for term in terms_of(operator))
    return is_truncated(operator) and not is_diagonal


def products_of(operator: Operator, shape: torch.Size) -> list[TruncatedProduct]:
    """The terms of an operator on (out, in), but for those that are diagonal."""
    device = _device_of(operator)
    return [_product(t, shape, device) for t in terms_of(operator) if not isinstance(t, Diagonal)]


def _device_of(operator: Operator) -> torch.device | None:
    for term in terms_of(operator):
        if isinstance(term, Gram):
            return term.matrix.device
        if isinstance(term, (Kronecker, TruncatedProduct)):
            return term.inputs.device
    return None


def _product(term: Operator, shape: torch.Size, device: torch.device | None) -> TruncatedProduct:
    outputs, inputs = (isotropic(dim, device=device) for dim in shape)
    if isinstance(term, Identity):
        return TruncatedProduct(outputs, inputs, term.scale)
    if isinstance(term, Gram):
        return TruncatedProduct(outputs, term.matrix)
    if isinstance(term, Kronecker):
        return TruncatedProduct(term.outputs, term.inputs, term.scale)
    assert isinstance(term, TruncatedProduct), "not a sum of products"
    return term


def fills_space(operator: Operator, shape: torch.Size) -> bool:
    """Do the leading directions leave nothing out, of inputs and, where there are any, outputs?"""
    products = products_of(operator, shape)
    outputs, inputs = [p.outputs for p in products], [p.inputs for p in products]
    return _fill(inputs) and (_fill(outputs) or all(map(_is_isotropic, outputs)))


def _fill(factors: Sequence[Factor]) -> bool:
    whole = [f for f in factors if not isinstance(f, Truncated)]
    num = sum(f.rank for f in factors if isinstance(f, Truncated))
    return bool(whole) or num >= len(factors[0].diagonal())


def _is_isotropic(factor: Factor) -> bool:
    return isinstance(factor, Truncated) and factor.rank == 0


def in_full(operator: Operator, shape: torch.Size) -> Operator:
    """The same as a Gram, or a sum of Kronecker products of whole matrices."""
    products = products_of(operator, shape)
    diagonals = [t.values.double() for t in terms_of(operator) if isinstance(t, Diagonal)]
    if not all(_is_isotropic(p.outputs) for p in products):
        assert not diagonals
        wholes = [Kronecker(_whole(p.outputs), _whole(p.inputs), p.scale) for p in products]
        return wholes[0] if len(wholes) == 1 else Sum(tuple(wholes))
    matrix = torch.zeros(shape[1], shape[1], dtype=torch.float64, device=_device_of(operator))
    for p in products:
        assert isinstance(p.outputs, Truncated)
        matrix.add_(dense_factor(p.inputs), alpha=p.scale * p.outputs.rest)
    for values in diagonals:
        matrix.diagonal().add_(values.view(-1))
    return Gram(matrix)


def dense_factor(factor: Factor) -> Tensor:
    """A factor as a matrix, in float64."""
    return factor.dense() if isinstance(factor, Truncated) else factor.double()


def _whole(factor: Factor) -> Tensor:
    """A matrix, in float32 if and only if it is regular, as `without_rounding` has it."""
    if not isinstance(factor, Truncated):
        return factor
    return factor.dense() if factor.is_singular else factor.dense().float()


def _rounding(factor: Factor, stored: torch.dtype) -> float:
    """How much rounding may have added to a singular factor; 0 for a regular one."""
    if isinstance(factor, Truncated):
        size = factor.norm * relative_rounding(factor.dim, stored)
        return size if factor.is_singular else 0.0
    return 0.0 if is_regular(factor) else float(rounding_level(factor, stored))


@dataclass(frozen=True)
class _Side:
    """The factors of one side, in a basis of all their leading directions."""

    basis: Tensor | None  # (d, R); None: all of the space
    factors: list[Factor]  # (R, R), either all truncated or none
    rests: list[float]  # of each, outside of the basis

    @property
    def num_outside(self) -> int:
        return 0 if self.basis is None else self.basis.shape[0] - self.basis.shape[1]

    def turned(self, q: Tensor) -> "_Side":  # (R, R)
        basis = q if self.basis is None else self.basis @ q
        return _Side(basis, _turn(self.factors, q), self.rests)


def _join(factors: Sequence[Factor]) -> _Side:
    """A basis by QR; a direction that several have leaves another one in, which does no harm."""
    if _fill(factors):
        return _Side(None, [dense_factor(f) for f in factors], [0.0] * len(factors))
    truncated = [f for f in factors if isinstance(f, Truncated)]
    basis, turned = torch.linalg.qr(torch.cat([f.vectors for f in truncated], 1))
    return _Side(basis, _with_vectors(truncated, turned), [f.rest for f in truncated])


def _turn(factors: Sequence[Factor], q: Tensor) -> list[Factor]:
    """QᵀAQ of each; of those that are truncated, all at once."""
    truncated = [f for f in factors if isinstance(f, Truncated)]
    if not truncated:
        return [q.mT @ dense_factor(f) @ q for f in factors]
    return _with_vectors(truncated, q.mT @ torch.cat([f.vectors for f in truncated], 1))


def _with_vectors(factors: Sequence[Truncated], vectors: Tensor) -> list[Factor]:
    parts = vectors.split([f.rank for f in factors], 1)
    return [replace(f, vectors=part) for f, part in zip(factors, parts, strict=True)]


def _combine(factors: Sequence[Factor], coefficients: Sequence[float]) -> Tensor:
    """The sum of factors times numbers."""
    truncated = [f for f in factors if isinstance(f, Truncated)]
    if not truncated:
        scaled = [dense_factor(f) * c for f, c in zip(factors, coefficients, strict=True)]
        return torch.stack(scaled).sum(0)
    vectors = torch.cat([f.vectors for f in truncated], 1)
    pairs = list(zip(truncated, coefficients, strict=True))
    values = torch.cat([(f.values - f.rest) * c for f, c in pairs])
    total: Tensor = (vectors * values) @ vectors.mT
    total.diagonal().add_(sum(f.rest * c for f, c in pairs))
    return total


@dataclass(frozen=True)
class Apart:
    """An operator that has fallen apart."""

    v: Tensor  # (out, R')
    u: Tensor  # (in, R)
    inner: list[TruncatedProduct]  # on (R', R)
    border: Tensor  # (R' + 1, R + 1), eigenvalues of the other parts; 0: no model has anything
    levels: list[tuple[float, float]]  # what rounding may have added to singular O_m, G_m

    @property
    def multiplicity(self) -> Tensor:  # (R' + 1, R + 1)
        """How many directions each unknown stands for."""
        rows, columns = (self.border.new_ones(num) for num in self.border.shape)
        rows[-1], columns[-1] = (float(b.shape[0] - b.shape[1]) for b in (self.v, self.u))
        return rows[:, None] * columns

    @property
    def has_inner(self) -> bool:
        return self.border[:-1, :-1].numel() > 0

    @property
    def raised_inner(self) -> list[TruncatedProduct]:
        """`inner` with singular factors raised, as in `KroneckerBasis.rotate`."""
        pairs = zip(self.inner, self.levels, strict=True) if self.has_inner else ()
        return [
            TruncatedProduct(_raise(t.outputs, of_o), _raise(t.inputs, of_g), t.scale)
            for t, (of_o, of_g) in pairs
        ]

    @property
    def is_border_full(self) -> bool:
        """Has it something for every direction outside of `inner`?"""
        missing = (self.border == 0) & (self.multiplicity > 0)
        missing[:-1, :-1] = False
        return not bool(missing.any())

    @property
    def is_regular(self) -> bool:
        return self.is_border_full and not any(map(any, self.levels))


def _raise(factor: Factor, level: float) -> Factor:
    if isinstance(factor, Truncated):
        return factor.raised(level)
    raised = factor.clone()
    raised.diagonal().add_(level)
    return raised


def fall_apart(products: Sequence[TruncatedProduct], stored: torch.dtype) -> Apart:
    """See a sum of products in the bases of their leading directions."""
    outputs = _join([p.outputs for p in products])
    inputs = _join([p.inputs for p in products])
    of_left = [p.scale * g for p, g in zip(products, inputs.rests, strict=True)]
    of_right = [p.scale * o for p, o in zip(products, outputs.rests, strict=True)]
    rest = sum(c * g for c, g in zip(of_right, inputs.rests, strict=True))
    # Where nothing is outside, a basis that is as good for the preconditioner.
    or_left = [p.scale * trace_of(p.inputs) for p in products]
    or_right = [p.scale * trace_of(p.outputs) for p in products]
    v, left, rest = _diagonalize(outputs, of_left, or_left, rest, stored)
    u, right, rest = _diagonalize(inputs, of_right, or_right, rest, stored)
    assert v.basis is not None
    assert u.basis is not None
    border = left.new_zeros(len(left) + 1, len(right) + 1)
    border[:-1, -1], border[-1, :-1], border[-1, -1] = left, right, rest
    factors = zip(v.factors, u.factors, products, strict=True)
    inner = [TruncatedProduct(o, g, p.scale) for o, g, p in factors]
    levels = [(_rounding(p.outputs, stored), _rounding(p.inputs, stored)) for p in products]
    return Apart(v.basis, u.basis, inner, border, levels)


def _diagonalize(
    side: _Side,
    coefficients: Sequence[float],
    otherwise: Sequence[float],
    rest: float,
    stored: torch.dtype,
) -> tuple[_Side, Tensor, float]:
    """Turn a basis so that a sum of its factors is diagonal; what is only rounding is 0."""
    has_border = any(coefficients)
    matrix = _combine(side.factors, coefficients if has_border else otherwise)
    values, vectors = torch.linalg.eigh(matrix)
    turned = side.turned(vectors)
    if not has_border:
        return turned, torch.zeros_like(values), 0.0
    num = side.num_outside
    level = relative_rounding(len(matrix) + num, stored)
    level *= math.hypot(float(matrix.norm()), num**0.5 * rest)
    return turned, torch.where(values > level, values, 0), rest if rest > level else 0.0


class Coordinates:
    """The unknowns (R' + 1, R + 1) of a system that has fallen apart, given its residual.

    Those of the border are lengths along the residual's own rows, columns and rest.
    """

    def __init__(self, apart: Apart, residual: Tensor) -> None:
        self._v, self._u = v, u = apart.v, apart.u
        border = apart.border
        left, right = v.mT @ residual, residual @ u
        inner = left @ u
        self._left = self._right = self._rest = None
        lengths = torch.zeros_like(border)
        if bool(border[:-1, -1].any()):
            self._left = torch.addmm(left, inner, u.mT, alpha=-1)  # (R', in)
            lengths[:-1, -1] = self._left.norm(dim=1)
        if bool(border[-1, :].any()):
            self._right = torch.addmm(right, v, inner, alpha=-1)  # (out, R)
            lengths[-1, :-1] = self._right.norm(dim=0)
        if self._right is not None and bool(border[-1, -1] > 0):
            self._rest = torch.addmm(residual, v, left, alpha=-1)  # (out, in)
            self._rest.addmm_(self._right, u.mT, alpha=-1)
            lengths[-1, -1] = self._rest.norm()
        lengths = torch.where(border > 0, lengths, 0)
        self._units = torch.where(lengths > 0, 1 / lengths, 0)
        self.residual = lengths
        self.residual[:-1, :-1] = inner

    def leave(self, x: Tensor) -> Tensor:  # (R' + 1, R + 1) -> (out, in)
        """The correction of some unknowns."""
        along = x * self._units
        rows = x[:-1, :-1] @ self._u.mT
        if self._left is not None:
            rows += self._left * along[:-1, -1:]
        result = self._v @ rows
        if self._right is not None:
            result.addmm_(self._right * along[-1, :-1], self._u.mT)
        if self._rest is not None:
            result.add_(self._rest, alpha=float(along[-1, -1]))
        return result

    def enter(self, y: Tensor) -> Tensor:  # (out, in) -> (R' + 1, R + 1)
        """What a matrix is along the unknowns: the adjoint of `leave`."""
        rows = self._v.mT @ y
        x = torch.zeros_like(self.residual)
        x[:-1, :-1] = rows @ self._u
        if self._left is not None:
            x[:-1, -1] = (rows * self._left).sum(1) * self._units[:-1, -1]
        if self._right is not None:
            x[-1, :-1] = ((y @ self._u) * self._right).sum(0) * self._units[-1, :-1]
        if self._rest is not None:
            x[-1, -1] = inner_product(y, self._rest) * self._units[-1, -1]
        return x
