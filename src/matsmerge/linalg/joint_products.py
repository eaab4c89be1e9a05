"""Sums of truncated products, with the directions of all models side by side.

    C_m(D) = c_m O_m D G_m,  G_m = U_m s_m U_mᵀ + g_m,  O_m = V_m t_m V_mᵀ + o_m

where s_m and t_m are what the values of leading directions are above the rest. Of a matrix D_m for
each model

    e_m = D_m U_m,  f_m = V_mᵀ D_m,  z_m = V_mᵀ D_m U_m

    sum_m C_m(D_m) = sum_m c_m o_m g_m D_m
                   + sum_m c_m (o_m e_m + V_m t_m z_m) s_m U_mᵀ
                   + sum_m c_m g_m V_m t_m f_m

whose second and third line are one product of large matrices each, and not many of small ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matsmerge.linalg.operators import Operator, TruncatedProduct
from matsmerge.linalg.truncated import Truncated


def is_joinable(operator: Operator) -> bool:
    """Is it a product of which both factors are truncated?"""
    if not isinstance(operator, TruncatedProduct):
        return False
    return isinstance(operator.outputs, Truncated) and isinstance(operator.inputs, Truncated)


@dataclass(frozen=True)
class _Block:
    """What is one model's of the directions: rows of f, columns of e."""

    rows: slice
    columns: slice
    scale: float  # c_m


@dataclass(frozen=True)
class JointProducts(Operator):
    """The sum of truncated products; its other methods compute in the precision it is in."""

    v: Tensor  # (out, r'), r' directions of all models together
    u: Tensor  # (in, r)
    t: Tensor  # (r',)
    s: Tensor  # (r,)
    of_rows: Tensor  # (r',), c_m g_m of each
    of_columns: Tensor  # (r,), c_m o_m
    rest: float  # sum_m c_m o_m g_m
    blocks: tuple[_Block, ...]

    def __call__(self, x: Tensor, /) -> Tensor:
        own = self.to(x.dtype)
        return own.spread(x * own.rest, x @ own.u, own.v.mT @ x)

    def __mul__(self, scale: float, /) -> "JointProducts":
        return replace(
            self,
            of_rows=self.of_rows * scale,
            of_columns=self.of_columns * scale,
            rest=self.rest * scale,
            blocks=tuple(replace(b, scale=b.scale * scale) for b in self.blocks),
        )

    @property
    def size(self) -> float:
        """What its largest coefficients add up to."""
        coefficients = (self.of_rows, self.of_columns)
        of_parts = sum(float(c.max()) for c in coefficients if len(c))
        return of_parts + self.rest + max(b.scale for b in self.blocks)

    def to(self, dtype: torch.dtype) -> "JointProducts":
        names = ("v", "u", "t", "s", "of_rows", "of_columns")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})

    def diagonal(self) -> Tensor:
        total = self.v.new_full((len(self.v), len(self.u)), self.rest)
        of_v, of_u = self.v.square() * self.t, self.u.square() * self.s
        total += (of_v @ self.of_rows)[:, None] + of_u @ self.of_columns
        for b in self.blocks:
            along = of_v[:, b.rows].sum(1)[:, None] * of_u[:, b.columns].sum(1)
            total.add_(along, alpha=b.scale)
        return total

    def inside(self, e: Tensor) -> Tensor:  # (out, r) -> (out, r)
        """c_m V_m t_m V_mᵀ e_m of each model."""
        found = torch.empty_like(e)
        for b in self.blocks:
            v, t = self.v[:, b.rows], self.t[b.rows, None]
            found[:, b.columns] = v @ (v.mT @ e[:, b.columns]).mul_(t * b.scale)
        return found

    def spread(self, image: Tensor, e: Tensor, f: Tensor) -> Tensor:
        """The sum of the three lines above, into the first."""
        along = self.inside(e).addcmul_(e, self.of_columns)
        image.addmm_(along.mul_(self.s), self.u.mT)
        return image.addmm_(self.v, f * (self.t * self.of_rows)[:, None])

    def energy(self, e: Tensor, f: Tensor) -> float:
        """The sum of <D_m, C_m(D_m)>, but for that of the first line."""
        total = (e.square().sum(0) * self.s) @ self.of_columns
        total += (f.square().sum(1) * self.t) @ self.of_rows
        for b in self.blocks:
            z = self.v[:, b.rows].mT @ e[:, b.columns]
            total += b.scale * (self.t[b.rows, None] * z.square() * self.s[b.columns]).sum()
        return float(total)


def join_products(products: Sequence[TruncatedProduct]) -> JointProducts:
    """See products of which both factors are truncated side by side."""
    outputs, inputs = [p.outputs for p in products], [p.inputs for p in products]
    o = [f for f in outputs if isinstance(f, Truncated)]
    g = [f for f in inputs if isinstance(f, Truncated)]
    assert len(o) == len(g) == len(products), "a factor is a whole matrix"
    of_rows = [p.scale * f.rest for p, f in zip(products, g, strict=True)]
    of_columns = [p.scale * f.rest for p, f in zip(products, o, strict=True)]
    rows, columns = _slices(f.rank for f in o), _slices(f.rank for f in g)
    scales = [p.scale for p in products]
    return JointProducts(
        torch.cat([f.vectors for f in o], 1),
        torch.cat([f.vectors for f in g], 1),
        torch.cat([f.values - f.rest for f in o]),
        torch.cat([f.values - f.rest for f in g]),
        torch.cat([torch.full_like(f.values, c) for f, c in zip(o, of_rows, strict=True)]),
        torch.cat([torch.full_like(f.values, c) for f, c in zip(g, of_columns, strict=True)]),
        sum(c * f.rest for f, c in zip(g, of_columns, strict=True)),
        tuple(_Block(*found) for found in zip(rows, columns, scales, strict=True)),
    )


class Gathered:
    """Truncated products and a matrix D_m for each, which come one after the other."""

    def __init__(self, like: Tensor) -> None:
        self._products: list[TruncatedProduct] = []
        self._image = torch.zeros_like(like, dtype=torch.float64)
        self._energy = 0.0
        self._e: list[Tensor] = []
        self._f: list[Tensor] = []

    def add(self, product: TruncatedProduct, matrix: Tensor) -> None:
        o, g = product.outputs, product.inputs
        assert isinstance(o, Truncated)
        assert isinstance(g, Truncated)
        self._products.append(product)
        along = product.scale * o.rest * g.rest
        self._image.add_(matrix, alpha=along)
        self._energy += along * float(torch.dot(matrix.flatten(), matrix.flatten()))
        self._e.append(matrix @ g.vectors)
        self._f.append(o.vectors.mT @ matrix)

    def join(self) -> tuple[JointProducts, Tensor, float] | None:
        """A = sum_m C_m, sum_m C_m(D_m) and the sum of <D_m, C_m(D_m)>; None if there are none."""
        if not self._products:
            return None
        joint = join_products(self._products)
        e, f = torch.cat(self._e, 1), torch.cat(self._f)
        self._e, self._f = [], []
        return joint, joint.spread(self._image, e, f), self._energy + joint.energy(e, f)


def _slices(numbers: Iterable[int]) -> list[slice]:
    """Neighbouring slices of some lengths."""
    found, begin = [], 0
    for number in numbers:
        found.append(slice(begin, begin + number))
        begin += number
    return found
