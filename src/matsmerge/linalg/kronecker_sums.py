"""Sums of Kronecker products, X -> sum_m O_m X G_m: K-FAC of several models.

They have no closed form but for two models. With more, conjugate gradients need the nearest single
Kronecker product as a preconditioner, and its eigenbasis to compute in: there the factors are
graded, entry ij no larger than sqrt(λ_i λ_j), so that products in float32 are as good as the
eigenvalues are spread, where in the models' own basis they would drown the small ones.

Factors are taken to be positive semi-definite, as `without_rounding` makes them. Directions that
no model has anything for, to the precision that factors were `stored` in, stay at the start.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matsmerge.linalg.operators import Identity, Kronecker, Operator, Sum, trace_of
from matsmerge.linalg.rounding import is_regular, rounding_level
from matsmerge.linalg.system import Solution, Status, System

_ALTERNATIONS = 20
_PANEL = 512  # columns computed at once


def kroneckers_of(operator: Operator) -> Sequence[Kronecker]:
    """The terms of a sum of Kronecker products, or the one there is."""
    if isinstance(operator, Kronecker):
        return [operator]
    found = operator.kroneckers() if isinstance(operator, Sum) else None
    assert found is not None, "not a sum of Kronecker products"
    return found


def is_kronecker_sum(operator: Operator) -> bool:
    return isinstance(operator, Kronecker) or (
        isinstance(operator, Sum) and operator.kroneckers() is not None
    )


def nearest_kronecker(terms: Sequence[Kronecker]) -> Kronecker:
    """The single product Ō ⊗ Ḡ nearest to the sum, Ō = sum a_m O_m and Ḡ = sum b_m G_m.

    The best rank one approximation of sum vec(O_m) vec(G_m)ᵀ (Van Loan & Pitsianis, 1993), found by
    alternating least squares on the inner products alone. All of them are positive, so both
    factors are positive semi-definite.
    """
    scales = torch.tensor([t.trace for t in terms], dtype=torch.float64)
    largest = float(scales.max())
    if not largest > 0:
        return terms[0]
    units_o = torch.tensor([1 / (trace_of(t.outputs) or 1) for t in terms], dtype=torch.float64)
    units_g = torch.tensor([1 / (trace_of(t.inputs) or 1) for t in terms], dtype=torch.float64)
    k_o = _inner_products([t.outputs for t in terms], units_o.tolist())
    k_g = _inner_products([t.inputs for t in terms], units_g.tolist())
    share = scales / largest
    a = b = torch.ones(len(terms), dtype=torch.float64)
    for _ in range(_ALTERNATIONS):
        a = share * (k_g @ b) / (b @ k_g @ b)
        b = share * (k_o @ a) / (a @ k_o @ a)
    outputs = _combine([t.outputs for t in terms], (a * units_o * largest).tolist())
    return Kronecker(outputs, _combine([t.inputs for t in terms], (b * units_g).tolist()))


def _inner_products(factors: Sequence[Tensor], units: Sequence[float]) -> Tensor:
    result = torch.empty(len(factors), len(factors), dtype=torch.float64)
    for i, first in enumerate(factors):
        scaled = first.flatten() * units[i]  # or squares of small gradients would underflow
        for j in range(i + 1):
            other = factors[j].flatten()
            dtype = torch.promote_types(scaled.dtype, other.dtype)
            product = float(torch.dot(scaled.to(dtype), other.to(dtype))) * units[j]
            result[i, j] = result[j, i] = product
    return result


def _combine(factors: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    total = torch.zeros_like(factors[0], dtype=torch.float64)
    for factor, coefficient in zip(factors, coefficients, strict=True):
        total.add_(factor, alpha=coefficient)
    return total


@dataclass(frozen=True)
class KroneckerBasis:
    """The eigenvectors of a Kronecker product, and its eigenvalues λ_O λ_G."""

    outputs: Tensor  # Q_O (out, out)
    inputs: Tensor | None  # Q_G (in, in); None: the factor is diagonal already
    values: Tensor  # (out, in); 0 in directions that one of the factors lacks

    def enter(self, x: Tensor) -> Tensor:
        x = self.outputs.mT @ x
        return x if self.inputs is None else x @ self.inputs

    def leave(self, x: Tensor) -> Tensor:
        x = self.outputs @ x
        return x if self.inputs is None else x @ self.inputs.mT

    def rotate(
        self, term: Kronecker, scale: float, dtype: torch.dtype, stored: torch.dtype
    ) -> Kronecker:
        """A product times a number in this basis: turned in float64, and only then rounded.

        Both factors get trace one; gradients are small, and would underflow in float32.
        """
        outputs = _turn_factor(term.outputs, self.outputs, stored)
        inputs = _turn_factor(term.inputs, self.inputs, stored)
        traces = trace_of(term.outputs) or 1.0, trace_of(term.inputs) or 1.0
        return Kronecker(
            (outputs / traces[0]).to(dtype),
            (inputs / traces[1]).to(dtype),
            term.scale * scale * traces[0] * traces[1],
        )


def _turn_factor(factor: Tensor, q: Tensor | None, stored: torch.dtype) -> Tensor:
    """Qᵀ A Q; a singular factor is raised by what rounding may have done to its eigenvectors.

    The null spaces of several models that are one in truth are a little apart after rounding. Steps
    into such a gap would be as long as it is narrow; raised on the left of the system only, they
    lead back to the start.
    """
    if q is None:
        return factor.double()
    turned = _turn(factor.double(), q)
    if not is_regular(factor):
        level = rounding_level(factor, stored).unsqueeze(-1)
        turned.diagonal(dim1=-2, dim2=-1).add_(level)
    return turned


def _turn(matrix: Tensor, q: Tensor) -> Tensor:
    """Qᵀ A Q of a symmetric matrix, of which only one half is computed."""
    half = matrix @ q
    turned = torch.empty_like(half)
    d = matrix.shape[-1]
    for i in range(0, d, _PANEL):
        j = min(i + _PANEL, d)
        panel = q[..., i:].mT @ half[..., i:j]  # (..., d - i, panel)
        turned[..., i:, i:j] = panel
        turned[..., i:j, i:] = panel.mT
    return turned


def decompose_kronecker(product: Kronecker, stored: torch.dtype = torch.float32) -> KroneckerBasis:
    """The eigenbasis of a product of factors that were stored in another precision."""
    values_o, q_o = _decompose(product.outputs, stored)
    if product.inputs.ndim == 1:
        values_g, q_g = product.inputs.double(), None
    else:
        values_g, q_g = _decompose(product.inputs, stored)
    values = values_o.unsqueeze(-1) * values_g.unsqueeze(-2) * product.scale
    return KroneckerBasis(q_o, q_g, values)


def _decompose(factor: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """Eigenvalues, those that are only rounding as 0, and eigenvectors."""
    values, vectors = torch.linalg.eigh(factor.double())
    level = rounding_level(factor, stored).unsqueeze(-1)
    return torch.where(values > level, values, 0), vectors


def to_unit_trace(terms: Sequence[Kronecker]) -> tuple[list[Kronecker], list[float]]:
    """The products of factors with trace one, in float64, and what each was divided by."""
    units, scales = [], []
    for term in terms:
        traces = trace_of(term.outputs), trace_of(term.inputs)
        scales.append(traces[0] * traces[1] * term.scale)
        outputs, inputs = (
            factor.double() / (trace or 1.0)
            for factor, trace in zip((term.outputs, term.inputs), traces, strict=True)
        )
        units.append(Kronecker(outputs, inputs))
    return units, scales


def hold(system: System, strength: float) -> System:
    """(A + λ) D = R: the start holds on, λ relative to the mean eigenvalue of A.

    The solution minimises f(X) + λ/2 |X - X0|². Beside Kronecker products it is one of them.
    """
    if strength == 0:
        return system
    scale = strength * float(system.operator.diagonal().double().mean())
    anchor: Operator = Identity(scale)
    if is_kronecker_sum(system.operator):
        like = kroneckers_of(system.operator)[0]
        anchor = Kronecker(_ones(like.outputs), _ones(like.inputs), scale)
    return replace(system, operator=system.operator + anchor)


def _ones(factor: Tensor) -> Tensor:  # (d, d), (groups, d, d), or a diagonal (d,)
    """The identity, of a factor's shape."""
    ones = torch.ones(factor.shape[:-1], dtype=torch.float32, device=factor.device)
    return torch.ones_like(factor) if factor.ndim == 1 else torch.diag_embed(ones)


def solve_pair(system: System, stored: torch.dtype = torch.float32) -> Solution:
    """O_1 X G_1 + O_2 X G_2 = B in closed form, by diagonalising each pair at once.

    With U such that Uᵀ(G_1 + G_2)U = 1 and UᵀG_1U = μ, and V the same for O_1 and O_2 with ν, the
    operator multiplies entry ij of VᵀXU by c_1 ν_i μ_j + c_2 (1 - ν_i)(1 - μ_j), c_m the scales of
    the products. Intermediate-task merging is this case; one model alone is solved the same way.
    """
    terms = kroneckers_of(system.operator)
    units, scales = to_unit_trace(terms)
    if len(units) == 1:
        units, scales = units * 2, [scales[0], 0.0]
    v, nu = _diagonalize_pair(units[0].outputs, units[1].outputs, stored)
    u, mu = _diagonalize_pair(units[0].inputs, units[1].inputs, stored)
    nu, mu = nu.unsqueeze(-1), mu.unsqueeze(-2)
    weights = scales[0] * nu * mu + scales[1] * (1 - nu) * (1 - mu)
    rotated = v.mT @ system.residual
    rotated = rotated * u if u.ndim == 1 else rotated @ u
    # What one model lacks on the left and the other on the right has no weight but what rounding of
    # singular factors gives it: of ν and μ, as much as of the factors along their columns.
    of_nu = _rounding_of_pair(v, [t.outputs for t in terms], stored).unsqueeze(-1)
    of_mu = _rounding_of_pair(u, [t.inputs for t in terms], stored).unsqueeze(-2)
    rounding = scales[0] * (nu * of_mu + of_nu * mu + of_nu * of_mu)
    rounding = rounding + scales[1] * ((1 - nu) * of_mu + of_nu * (1 - mu) + of_nu * of_mu)
    seen = weights > rounding + torch.finfo(torch.float64).eps * float(weights.max())
    turned = torch.where(seen, rotated / weights, 0)
    correction = v @ (turned * u if u.ndim == 1 else turned @ u.mT)
    left = system.residual - system.operator(correction)
    full = bool(seen.all()) and bool((v != 0).any(-2).all())
    full = full and bool((u != 0).all() if u.ndim == 1 else (u != 0).any(-2).all())
    return Solution(
        correction,
        Status.SOLVED if full else Status.SINGULAR,
        system.relative(float(left.norm())),
        system.objective_at(correction, left),
    )


def _diagonalize_pair(a: Tensor, b: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """U and μ with Uᵀ(A + B)U = 1, UᵀAU = μ. Columns are 0 for what neither A nor B has."""
    a, b = a.double(), b.double()
    total = a + b
    if total.ndim == 1:
        seen = total > 0  # each number is as good as its own digits
        return torch.where(seen, total.rsqrt(), 0), torch.where(seen, a / total, 0)
    level = rounding_level(total, stored)
    values, vectors = torch.linalg.eigh(total)
    seen = values > level.unsqueeze(-1)
    u = vectors * torch.where(seen, values.rsqrt(), 0).unsqueeze(-2)
    # A mark of -1 tells directions that neither has from those that only A lacks, where μ is 0.
    inner_a = u.mT @ a @ u - torch.diag_embed((~seen).double())
    mu, turn = torch.linalg.eigh(inner_a)
    return (u @ turn) * (mu > -0.5).unsqueeze(-2), mu.clamp(0, 1)


def _rounding_of_pair(u: Tensor, factors: Sequence[Tensor], stored: torch.dtype) -> Tensor:
    """How much rounding may have changed μ of a pair; 0 if both are regular, or diagonals."""
    if u.ndim == 1 or all(map(is_regular, factors)):
        return u.new_zeros(u.shape[:-2] + u.shape[-1:] if u.ndim > 1 else u.shape)
    total = torch.stack([f.double() / (trace_of(f) or 1.0) for f in factors]).sum(0)
    return rounding_level(total, stored).unsqueeze(-1) * u.square().sum(-2)
