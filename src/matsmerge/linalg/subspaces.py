"""Subspaces of a second moment's largest eigenvalues: how two overlap, how a change splits.

    G = Q Λ Qᵀ, and Q_k the columns of the k largest eigenvalues
    overlap of two        |Q_aᵀ Q_b|² / min(k_a, k_b)       1: one holds the other; 0: orthogonal
    a change D of W       |D|² = |D Q_k Q_kᵀ|² + |D (1 - Q_k Q_kᵀ)|²
    what outputs notice   mean over inputs z of |D z|² = <D, D G>

Norms are Frobenius norms; W and D are (out, in), G is (in, in). What the paper (section 3) calls a
task parameter subspace is Q with the importance Λ of each of its directions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from matsmerge.linalg.eigenbasis import decompose


@dataclass(frozen=True)
class Directions:
    """A second moment's eigenvectors with its eigenvalues, the largest first."""

    values: Tensor  # (d,), float64; 0 where no larger than rounding
    vectors: Tensor  # (d, d), float64, one in each column

    @property
    def num_certain(self) -> int:
        """How many are more than rounding; the others could be any."""
        return int((self.values > 0).sum())

    def num_holding(self, energy: float) -> int:
        """How many of the largest hold a share of the trace."""
        sums = self.values.cumsum(0)
        if not self.num_certain:
            return 0
        # Sums of the same numbers differ by rounding, and a share of 1 must not ask for more.
        wanted = energy * float(sums[-1]) * (1 - 1e-12)
        return int((sums < wanted).sum()) + 1

    def share(self, k: int) -> float:
        """The share of the trace that the k largest hold."""
        total = float(self.values.sum())
        return float(self.values[:k].sum()) / total if total else 0.0

    def top(self, k: int) -> Tensor:  # (d, k)
        """An orthonormal basis of the subspace of the k largest; a copy, so the rest can go."""
        return self.vectors[:, :k].clone()


def find_directions(gram: Tensor) -> Directions:  # (d, d)
    """Eigenvalues and vectors in float64.

    Rounding is taken to be float32's also for a matrix stored in bfloat16: that rounds every entry
    relative to itself, and the bound on what it does to eigenvalues would cut off real ones.
    """
    stored = torch.float64 if gram.dtype == torch.float64 else torch.float32
    basis = decompose(gram, stored)
    return Directions(basis.values.flip(0), basis.vectors.flip(1))


def overlap(a: Tensor, b: Tensor) -> float:  # (d, k_a), (d, k_b), orthonormal columns
    """How much of the smaller subspace lies in the larger; NaN where one has no directions.

    It is the mean squared cosine of the principal angles between the two.
    """
    smaller = min(a.shape[1], b.shape[1])
    return float((a.mT @ b).square().sum()) / smaller if smaller else float("nan")


def overlap_at_random(num_a: int, num_b: int, dim: int) -> float:
    """The mean overlap of a subspace with one of random directions."""
    return max(num_a, num_b) / dim if min(num_a, num_b) else float("nan")


@dataclass(frozen=True)
class Split:
    """A matrix of weights, or a change of one, seen from a subspace of its inputs."""

    inside: float  # |D Q Qᵀ|
    outside: float  # |D (1 - Q Qᵀ)|
    at_outputs: float  # sqrt <D, D G>: root mean square of |D z|


def energies(change: Tensor, directions: Directions) -> Tensor:  # (out, in) -> (in,)
    """Squared norms of a matrix along each direction; those of blocks of its rows add up."""
    return (change.double() @ directions.vectors).square().sum(0)


def split(along: Tensor, directions: Directions, k: int) -> Split:  # (in,), of `energies`
    """Split a matrix by the subspace of the k largest eigenvalues."""
    return Split(
        float(along[:k].sum().sqrt()),
        float(along[k:].sum().sqrt()),
        float((along * directions.values).sum().sqrt()),
    )
