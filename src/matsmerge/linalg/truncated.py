"""Second moments that are known by their leading directions: a task's subspace, and what is left.

    G ~ U diag(s) Uᵀ + g (I - U Uᵀ)      U (d, r), orthonormal columns

What is outside of the subspace is taken to be the same in every direction, so that the trace is
kept: g = (trace - sum s) / (d - r). No matrix (d, d) is held.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Truncated:
    """A positive semi-definite matrix: leading eigenvectors, and one eigenvalue for the rest."""

    vectors: Tensor  # (d, r), orthonormal columns, float64
    values: Tensor  # (r,), float64, the largest first
    rest: float  # the eigenvalue of every direction outside of the subspace

    @property
    def dim(self) -> int:
        return len(self.vectors)

    @property
    def rank(self) -> int:
        return len(self.values)

    @property
    def trace(self) -> float:
        return float(self.values.sum()) + self.rest * (self.dim - self.rank)

    def dense(self) -> Tensor:  # (d, d)
        """The matrix itself, in float64."""
        inner: Tensor = (self.vectors * (self.values - self.rest)) @ self.vectors.mT
        inner.diagonal().add_(self.rest)
        return inner


def truncate(matrix: Tensor, rank: int) -> Truncated:  # (d, d)
    """The leading directions of a second moment, and the mean of its other eigenvalues."""
    dim = len(matrix)
    values, vectors = torch.linalg.eigh(matrix.double())
    rank = min(rank, dim)
    kept = values[dim - rank :].flip(0).clamp(min=0)
    rest = float(values[: dim - rank].clamp(min=0).mean()) if rank < dim else 0.0
    return Truncated(vectors[:, dim - rank :].flip(1), kept, rest)
