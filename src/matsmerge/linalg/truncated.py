"""Second moments that are known by their leading directions: a task's subspace, and what is left.

    G ~ U diag(s) Uᵀ + g (I - U Uᵀ)      U (d, r), orthonormal columns

What is outside of the subspace is taken to be the same in every direction, so that the trace is
kept: g = (trace - sum s) / (d - r). No matrix (d, d) is held.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from matsmerge.linalg.rounding import relative_rounding


@dataclass(frozen=True)
class Truncated:
    """A positive semi-definite matrix: leading eigenvectors, and one eigenvalue for the rest."""

    vectors: Tensor  # (d, r), orthonormal columns, float64
    values: Tensor  # (r,), float64, the largest first
    rest: float  # the eigenvalue of every direction outside of the subspace

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def dim(self) -> int:
        return len(self.vectors)

    @property
    def rank(self) -> int:
        return len(self.values)

    @property
    def is_whole(self) -> bool:
        """Are all directions known?"""
        return self.rank == self.dim

    @property
    def trace(self) -> float:
        return float(self.values.sum()) + self.rest * (self.dim - self.rank)

    @property
    def mean(self) -> float:
        """The mean eigenvalue."""
        return self.trace / self.dim

    @property
    def norm(self) -> float:
        """The Frobenius norm."""
        outside = self.rest * (self.dim - self.rank) ** 0.5
        return math.hypot(float(self.values.norm()), outside)

    @property
    def is_singular(self) -> bool:
        is_null = self.rest == 0 and self.rank < self.dim
        return is_null or bool((self.values == 0).any())

    def __mul__(self, scale: float) -> "Truncated":
        return Truncated(self.vectors, self.values * scale, self.rest * scale)

    def after(self, x: Tensor) -> Tensor:  # (n, d)
        """X G, in the precision of X."""
        u = self.vectors.to(x.dtype)
        inside = (x @ u).mul_((self.values - self.rest).to(x.dtype))
        return torch.addmm(x, inside, u.mT, beta=self.rest)

    def before(self, x: Tensor) -> Tensor:  # (d, n)
        """G X, in the precision of X."""
        u = self.vectors.to(x.dtype)
        inside = (u.mT @ x).mul_((self.values - self.rest).to(x.dtype)[:, None])
        return torch.addmm(x, u, inside, beta=self.rest)

    def diagonal(self) -> Tensor:  # (d,)
        return self.vectors.square() @ (self.values - self.rest) + self.rest

    def leading(self, num: int) -> "Truncated":
        """With fewer directions, and the same trace."""
        if num >= self.rank:
            return self
        rest = (self.trace - float(self.values[:num].sum())) / (self.dim - num)
        return Truncated(self.vectors[:, :num], self.values[:num], rest)

    def raised(self, level: float) -> "Truncated":
        """G + level I."""
        return Truncated(self.vectors, self.values + level, self.rest + level)

    def without_rounding(self, ridge: float = 0.0) -> "Truncated":
        """Without directions that only rounding to float32 may have made, plus a ridge.

        As `rounding.without_rounding`. Directions like all that is left are not told from it.
        """
        level = self.norm * relative_rounding(self.dim, torch.float32)
        lowest = min([self.rest] * (self.rank < self.dim) + self.values.tolist(), default=0.0)
        if lowest + ridge > level:
            return self.raised(ridge)
        rest = self.rest if self.rest > level else 0.0
        values = torch.where(self.values > level, self.values, 0)
        kept = values != rest
        return Truncated(self.vectors[:, kept], values[kept], rest).raised(ridge)

    def dense(self) -> Tensor:  # (d, d)
        """The matrix itself, in float64."""
        inner: Tensor = (self.vectors * (self.values - self.rest)) @ self.vectors.mT
        inner.diagonal().add_(self.rest)
        return inner


Factor = Truncated | Tensor  # a second moment (d, d), either way


def truncate(matrix: Tensor, rank: int) -> Truncated:  # (d, d)
    """The leading directions of a second moment, and the mean of its other eigenvalues."""
    dim = len(matrix)
    values, vectors = torch.linalg.eigh(matrix.double())
    rank = min(rank, dim)
    kept = values[dim - rank :].flip(0).clamp(min=0)
    rest = float(values[: dim - rank].clamp(min=0).mean()) if rank < dim else 0.0
    return Truncated(vectors[:, dim - rank :].flip(1), kept, rest)


def isotropic(dim: int, device: torch.device | str | None = None) -> Truncated:
    """The identity."""
    nothing = torch.zeros(dim, 0, dtype=torch.float64, device=device)
    return Truncated(nothing, nothing.new_zeros(0), 1.0)
