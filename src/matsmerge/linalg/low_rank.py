"""Matrices of low rank: the best one near a matrix, and the space that several share.

D ~ L R           L (rows, r), R (r, columns): the r largest singular values of D
U                 orthonormal columns that span what all of B_1 A_1, B_2 A_2, ... put out
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """Two factors of a matrix."""

    left: Tensor
    right: Tensor
    energy: float  # the share of the matrix's squared norm that their product keeps


def nearest_factors(matrix: Tensor, rank: int) -> Factors:
    """The factors of the nearest matrix of a rank; both have the same norm in each direction.

    From the eigenvectors of the smaller second moment, which is several times cheaper than a
    singular value decomposition and in float64 as good as one for weights in float32.
    """
    values = matrix.double()
    is_wide = values.shape[0] <= values.shape[1]
    wide = values if is_wide else values.mT
    moment = wide @ wide.mT
    rank = min(rank, len(moment))
    # eigh sorts in ascending order
    basis = torch.linalg.eigh(moment).eigenvectors[:, -rank:].flip(1)
    projected = basis.mT @ wide
    norms = projected.norm(dim=1)
    total = float(values.square().sum())
    energy = min(1.0, float(norms.square().sum()) / total) if total else 1.0
    split = norms.sqrt()
    left = basis * split
    right = projected / torch.where(split > 0, split, 1.0)[:, None]
    return Factors(left, right, energy) if is_wide else Factors(right.mT, left.mT, energy)


def shared_outputs(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """Left singular vectors of [L_1 R_1, L_2 R_2, ...], the largest first.

    As many as there are columns in the L_m together, or rows if those are fewer.
    """
    q, r = torch.linalg.qr(torch.cat(list(lefts), dim=1).double())
    moment = r.new_zeros(len(r), len(r))
    start = 0
    for left, right in zip(lefts, rights, strict=True):
        part = r[:, start : start + left.shape[1]]
        moment += part @ (right.double() @ right.double().mT) @ part.mT
        start += left.shape[1]
    result: Tensor = q @ torch.linalg.eigh(moment).eigenvectors.flip(1)
    return result
