"""Sketches of second moments: what they do to a few random directions (Nyström).

    Y = G Ω      G (d, d), Ω (d, k) of entries 1 and -1

Over rows z, Y is the sum of z (zᵀ Ω), at 4 k operations a number where G takes 2 d. Sketches with
the same Ω add up. The approximation

    G ~ Y (Ωᵀ Y)⁺ Yᵀ = B Bᵀ

is not above G in any direction. (Tropp, Yurtsever, Udell and Cevher, 2017, "Fixed-rank
approximation of a positive-semidefinite matrix from streaming data".)

Of k directions the last are hardly better than chance. So there are twice as many as are kept,
up to 128, of which all are kept: of a rank of 128 the second half is worth little, but costs no
operations. On output gradients of a sentence encoder the error of 64 directions, in the Frobenius
norm, is 1.3 times the least that is possible, where with 64 columns it is 2.3 times that, and 1.05
times with 256.

What B Bᵀ lacks is known on average: it is G (G + τ)⁻¹ G with τ such that the trace of
G (G + τ)⁻¹ is k, and so lacks τ k of the trace (Derezinski, Liang, Liao and Mahoney, 2020). The
trace of G is stored beside the sketch and gives τ. So a direction that has λ in B Bᵀ has nearly
λ + τ in G where λ is large, and is mostly chance where λ is below τ. It is given
λ + τ λ / (λ + 2 τ), the 2 from trials on spectra of many kinds: values then are near to what the
directions really hold, of which up to a third would otherwise be taken to lie outside of them.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from matsmerge.linalg.truncated import Truncated, truncate

SEED = 0
_COLUMNS = 2  # of a sketch, for each direction that is kept of it
_ENOUGH_COLUMNS = 128  # beyond which there are no more than directions
# Of BᵀB, from which columns are orthonormal to ten digits without a singular value decomposition.
_MOST_CONDITION = 1e6


def is_smaller(dim: int, rank: int) -> bool:
    """Are a rank's directions and the diagonal smaller than half of the matrix?"""
    return dim >= least_dim(rank)


def least_dim(rank: int) -> int:
    """The least dimension of which directions of this rank are smaller than the matrix."""
    return 2 * (rank + 1) + 1


def num_columns(dim: int, rank: int) -> int | None:
    """How many columns a sketch has; None where the upper half of G takes no more operations."""
    num = max(rank, min(_COLUMNS * rank, _ENOUGH_COLUMNS))
    return num if 4 * num < dim else None


@lru_cache(maxsize=64)
def directions(dim: int, num: int) -> Tensor:  # (d, k), float32; not to be changed
    """Ω, the same on every machine: bits of a counter-based generator, a stream for each column.

    Fewer columns or rows are the first of more.
    """
    num_words = -(-dim // 64)
    words = [
        np.random.Philox(key=SEED, counter=[0, column, 0, 0]).random_raw(num_words)
        for column in range(num)
    ]
    bits = np.unpackbits(np.stack(words).astype("<u8").view(np.uint8), axis=1, bitorder="little")
    signs = torch.from_numpy(bits[:, :dim].astype(np.float32)).mul_(2).sub_(1)
    return signs.mT  # column after column in memory, as it was drawn


def factor(sketch: Tensor) -> Tensor:  # (d, k) -> (d, k)
    """B of a sketch: orthogonal columns, the longest first. What is not finite stays so.

    Stable for moments of low rank: of G + ν I, from whose eigenvalues ν is subtracted. Rounding
    shows in ΩᵀY, which without it would be symmetric; ν is as large.
    """
    dim, num = sketch.shape
    y = sketch.double()
    if not bool(y.isfinite().all()):
        return torch.full_like(y, torch.nan)
    omega = directions(dim, num).to(y)
    core = omega.mT @ y
    rounding = torch.finfo(torch.float64).eps * float(core.norm())
    shift = max(float((core - core.mT).norm()), rounding) / dim
    if shift == 0:
        return torch.zeros_like(y)
    failed = True
    while failed:
        y_shifted = y + shift * omega
        core = omega.mT @ y_shifted
        lower, info = torch.linalg.cholesky_ex((core + core.mT) / 2)
        failed = bool(info)
        shift = 4 * shift if failed else shift
    b = torch.linalg.solve_triangular(lower, y_shifted.mT, upper=False).mT
    columns, squares = _turned(b)
    return columns.mul_(((squares - shift) / squares).clamp(min=0).sqrt())


def _turned(b: Tensor) -> tuple[Tensor, Tensor]:  # (d, k) -> (d, k), (k,)
    """The same B Bᵀ by orthogonal columns, the longest first, and their squared lengths.

    B Z with BᵀB = Z Λ Zᵀ, which takes a tenth of the time of singular values. Of columns that are
    far shorter than the longest, angles lose as many digits as their squares have fewer.
    """
    values, z = torch.linalg.eigh(b.mT @ b)
    least = torch.finfo(b.dtype).tiny  # what is 0 may come out a little below
    return b @ z.flip(1), values.flip(0).clamp(min=least)


def leading_of_sketch(sketch: Tensor, trace: float, rank: int) -> Tensor:  # (d, k) -> (d, r)
    """B of a sketch's leading directions alone, with the values that they have in G."""
    b = factor(sketch)
    lengths = b.norm(dim=0)
    low = lengths.square()
    tau = max(trace - float(low.sum()), 0.0) / len(low)
    values = low + tau * low / (low + 2 * tau) if tau > 0 else low
    found: Tensor = b * (values.sqrt() / lengths.where(lengths > 0, 1))
    return found[:, :rank]


def leading_of_moment(moment: Tensor, rank: int) -> Tensor:  # (d, d) -> (d, r)
    """B of the leading directions of G itself; what is not finite stays so."""
    if not bool(moment.isfinite().all()):
        return moment.new_full((len(moment), rank), torch.nan)
    exact = truncate(moment, rank)
    found: Tensor = exact.vectors * exact.values.sqrt()
    return found


def leading_of_sum(factors: Sequence[Tensor]) -> Tensor:  # (d, r) each -> (d, r)
    """B of the leading directions of a sum of B Bᵀ, as many as each of them has."""
    found = _turned(torch.cat(list(factors), 1))[0]
    return found[:, : factors[0].shape[1]]


def truncate_factor(b: Tensor, trace: float) -> Truncated:  # (d, r)
    """The directions of B with their values, and what is left of the trace."""
    columns, values = _turned(b.double())
    if len(values) and float(values[-1]) * _MOST_CONDITION > float(values[0]):
        vectors = columns.div_(values.sqrt())
    else:
        vectors, lengths, _ = torch.linalg.svd(b.double(), full_matrices=False)
        values = lengths.square()
    held = float(values.sum())
    if held > trace:  # by the rounding of B
        values *= trace / held
    rest = max(trace - held, 0.0) / max(len(b) - len(values), 1)
    return Truncated(vectors, values, rest)
