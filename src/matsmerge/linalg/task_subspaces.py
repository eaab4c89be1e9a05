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

# Of AᵀA, from whose eigenvectors a basis of what A spans is made without QR.
_MOST_CONDITION = 1e6
# The share of a square sum that must be outside of a subspace to be told by a difference.
_LEAST_OUTSIDE = 1e-10


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

    basis: Tensor  # (d, R), orthonormal columns
    factors: Sequence[Factor]  # (R, R), either all truncated or none
    values: Tensor  # (R,), eigenvalues of a sum of the factors, which is diagonal in this basis


def _diagonalize(factors: Sequence[Factor], coefficients: Sequence[float]) -> _Side:
    """A basis in which the sum of factors times numbers is diagonal."""
    truncated = [f for f in factors if isinstance(f, Truncated)]
    pairs = list(zip(factors, coefficients, strict=True))
    if _fill(factors):
        values, q = torch.linalg.eigh(torch.stack([dense_factor(f) * c for f, c in pairs]).sum(0))
        return _Side(q, [q.mT @ dense_factor(f) @ q for f in factors], values)
    found = _by_inner_products(truncated, coefficients)
    if found is not None:
        return found
    # A direction that several have leaves another one in, which does no harm.
    basis, turned = torch.linalg.qr(torch.cat([f.vectors for f in truncated], 1))
    squares = _above_rest(truncated, coefficients)
    values, q = torch.linalg.eigh((turned * squares) @ turned.mT)
    values = values + sum(f.rest * c for f, c in zip(truncated, coefficients, strict=True))
    return _Side(basis @ q, _with_vectors(truncated, q.mT @ turned), values)


def _by_inner_products(factors: Sequence[Truncated], coefficients: Sequence[float]) -> _Side | None:
    """The same from products of the columns of A = [w_1 U_1, w_2 U_2, ...] with each other.

    The w are such that the sum is A Aᵀ and a multiple of one. With AᵀA = Z Λ Zᵀ the basis is
    B = A Z Λ^(-1/2), in which A is Λ^(1/2) Zᵀ. This takes half the time that QR does and loses
    the condition of AᵀA times rounding: None where that would be too much.
    """
    squares = _above_rest(factors, coefficients)
    if not len(squares) or not bool((squares > 0).all()):
        return None
    vectors, w = torch.cat([f.vectors for f in factors], 1), squares.sqrt()
    values, z = torch.linalg.eigh(w[:, None] * (vectors.mT @ vectors) * w)
    if not float(values[0]) * _MOST_CONDITION > float(values[-1]):
        return None
    roots = values.sqrt()
    turned = roots[:, None] * z.mT / w
    basis = vectors @ (w[:, None] * z / roots)
    values = values + sum(f.rest * c for f, c in zip(factors, coefficients, strict=True))
    return _Side(basis, _with_vectors(factors, turned), values)


def _above_rest(factors: Sequence[Truncated], coefficients: Sequence[float]) -> Tensor:
    """What the values of all factors are above their rests, times a number for each factor."""
    pairs = zip(factors, coefficients, strict=True)
    return torch.cat([(f.values - f.rest) * c for f, c in pairs])


def _with_vectors(factors: Sequence[Truncated], vectors: Tensor) -> list[Truncated]:
    parts = vectors.split([f.rank for f in factors], 1)
    return [replace(f, vectors=part) for f, part in zip(factors, parts, strict=True)]


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
    outputs, inputs = [p.outputs for p in products], [p.inputs for p in products]
    of_left = [p.scale * g for p, g in zip(products, _rests(inputs), strict=True)]
    of_right = [p.scale * o for p, o in zip(products, _rests(outputs), strict=True)]
    rest = sum(c * g for c, g in zip(of_right, _rests(inputs), strict=True))
    # Where nothing is outside, a basis that is as good for the preconditioner.
    or_left = [p.scale * trace_of(p.inputs) for p in products]
    or_right = [p.scale * trace_of(p.outputs) for p in products]
    v = _diagonalize(outputs, of_left if any(of_left) else or_left)
    u = _diagonalize(inputs, of_right if any(of_right) else or_right)
    left, rest = _without_rounding(v, rest, stored, has_border=any(of_left))
    right, rest = _without_rounding(u, rest, stored, has_border=any(of_right))
    border = left.new_zeros(len(left) + 1, len(right) + 1)
    border[:-1, -1], border[-1, :-1], border[-1, -1] = left, right, rest
    factors = zip(v.factors, u.factors, products, strict=True)
    inner = [TruncatedProduct(o, g, p.scale) for o, g, p in factors]
    levels = [(_rounding(p.outputs, stored), _rounding(p.inputs, stored)) for p in products]
    return Apart(v.basis, u.basis, inner, border, levels)


def _rests(factors: Sequence[Factor]) -> list[float]:
    """What each has outside of the subspaces; 0 where there is nothing outside."""
    if _fill(factors):
        return [0.0] * len(factors)
    return [f.rest for f in factors if isinstance(f, Truncated)]


def _without_rounding(
    side: _Side, rest: float, stored: torch.dtype, *, has_border: bool
) -> tuple[Tensor, float]:
    """Eigenvalues of the border and of the rest; what is only rounding is 0."""
    values = side.values
    if not has_border:
        return torch.zeros_like(values), 0.0
    dim, num = side.basis.shape
    level = relative_rounding(dim, stored)
    level *= math.hypot(float(values.norm()), (dim - num) ** 0.5 * rest)
    return torch.where(values > level, values, 0), rest if rest > level else 0.0


class Coordinates:
    """The unknowns (R' + 1, R + 1) of a system that has fallen apart, given its residual.

    Those of the border are lengths along the residual's own rows, columns and rest:

        left    VᵀR(1 - UUᵀ)         = L - XUᵀ          L = VᵀR, X = VᵀRU
        right   (1 - VVᵀ)RU          = K - VX           K = RU
        rest    (1 - VVᵀ)R(1 - UUᵀ)  = R - VL - KUᵀ + VXUᵀ

    which are never written out: their multiples are taken of L, K, X and R.
    """

    def __init__(self, apart: Apart, residual: Tensor) -> None:
        self._v, self._u, self._all = apart.v, apart.u, residual
        border = apart.border
        self._left, self._right = apart.v.mT @ residual, residual @ apart.u
        self._inner = self._left @ apart.u
        lengths = torch.where(border > 0, self._lengths(border > 0), 0)
        self._units = torch.where(lengths > 0, 1 / lengths, 0)
        self.residual = lengths
        self.residual[:-1, :-1] = self._inner

    def _lengths(self, wanted: Tensor) -> Tensor:
        """By Pythagoras; where hardly anything is outside of the subspaces, as they are."""
        u, v, left, right, inner = self._u, self._v, self._left, self._right, self._inner
        of_rows, of_columns, of_inner = (x.square() for x in (left, right, inner))
        whole = torch.zeros_like(wanted, dtype=torch.float64)
        whole[:-1, -1], whole[-1, :-1] = of_rows.sum(1), of_columns.sum(0)
        whole[-1, -1] = inner_product(self._all, self._all)
        outside = whole.clone()
        outside[:-1, -1] -= of_inner.sum(1)
        outside[-1, :-1] -= of_inner.sum(0)
        outside[-1, -1] -= of_rows.sum() + of_columns.sum() - of_inner.sum()
        lengths = outside.clamp(min=0).sqrt()
        is_lost = wanted & (outside < _LEAST_OUTSIDE * whole)
        if bool(is_lost[:-1, -1].any()):
            lengths[:-1, -1] = torch.addmm(left, inner, u.mT, alpha=-1).norm(dim=1)
        if bool(is_lost[-1, :].any()):
            right = torch.addmm(right, v, inner, alpha=-1)
            lengths[-1, :-1] = right.norm(dim=0)
        if bool(is_lost[-1, -1]):
            rest = torch.addmm(self._all, v, left, alpha=-1)
            lengths[-1, -1] = rest.addmm_(right, u.mT, alpha=-1).norm()
        return lengths

    def leave(self, x: Tensor) -> Tensor:  # (R' + 1, R + 1) -> (out, in)
        """The correction of some unknowns."""
        along = x * self._units
        rows, columns, rest = along[:-1, -1:], along[-1, :-1], along[-1, -1]
        inner = x[:-1, :-1] - self._inner * (rows + columns - rest)
        result = self._v @ torch.addmm(self._left * (rows - rest), inner, self._u.mT)
        result.addmm_(self._right * (columns - rest), self._u.mT)
        return result.add_(self._all, alpha=float(rest))

    def enter(self, y: Tensor) -> Tensor:  # (out, in) -> (R' + 1, R + 1)
        """What a matrix is along the unknowns: the adjoint of `leave`."""
        left, right = self._v.mT @ y, y @ self._u
        inner = left @ self._u
        x = torch.zeros_like(self.residual)
        of_inner = inner * self._inner
        of_rows, of_columns = (left * self._left).sum(1), (right * self._right).sum(0)
        x[:-1, -1] = of_rows - of_inner.sum(1)
        x[-1, :-1] = of_columns - of_inner.sum(0)
        x[-1, -1] = inner_product(y, self._all) - of_rows.sum() - of_columns.sum() + of_inner.sum()
        x *= self._units
        x[:-1, :-1] = inner
        return x
