"""Sketches of second moments: what they do to a few random directions (Nyström).

    Y = G Ω      G (d, d), Ω (d, k) of entries 1, -1 and 0

Over rows z, Y is the sum of z (zᵀ Ω), at 4 k operations a number where G takes 2 d. Most of Ω is
zero, so that it is 2.5 k: numbers are dealt out to four groups, 16 neighbours at a time, and each
group has columns of its own. On the inputs and gradients of a sentence encoder four groups
approximate as well as one, while 16 double the error of the worst layers, and so do four of 64
neighbours each, which is a whole head of attention. Sketches with the same Ω add up. The
approximation

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
from torch.nn import functional as F  # noqa: N812

from matsmerge.linalg.truncated import Truncated, truncate

SEED = 0
_COLUMNS = 2  # of a sketch, for each direction that is kept of it
_ENOUGH_COLUMNS = 128  # beyond which there are no more than directions
_MOST_GROUPS = 4
_LEAST_COLUMNS = 32  # of a group
_CHUNK = 16  # neighbours in a group
# Of BᵀB, from which columns are orthonormal to ten digits without a singular value decomposition.
_MOST_CONDITION = 1e6


def is_smaller(dim: int, rank: int) -> bool:
    """Are a rank's directions and the diagonal smaller than half of the matrix?"""
    return dim >= least_dim(rank)


def least_dim(rank: int) -> int:
    """The least dimension of which directions of this rank are smaller than the matrix."""
    return 2 * (rank + 1) + 1


def num_columns(dim: int, rank: int) -> int | None:
    """How many columns a sketch has; None where all of G takes hardly more operations."""
    num = max(rank, min(_COLUMNS * rank, _ENOUGH_COLUMNS))
    return num if 4 * num < dim else None


def _num_groups(num: int) -> int:
    return max(1, min(_MOST_GROUPS, num // _LEAST_COLUMNS))


@lru_cache(maxsize=64)
def directions(dim: int, num: int) -> Tensor:  # (d, k), float32; not to be changed
    """Ω, the same on every machine: signs where a number is of the group that a column is of.

    Signs are bits of a counter-based generator, a stream for each column. Fewer rows are the first
    of more.
    """
    num_words = -(-dim // 64)
    words = [
        np.random.Philox(key=SEED, counter=[0, column, 0, 0]).random_raw(num_words)
        for column in range(num)
    ]
    bits = np.unpackbits(np.stack(words).astype("<u8").view(np.uint8), axis=1, bitorder="little")
    signs = torch.from_numpy(bits[:, :dim].astype(np.float32)).mul_(2).sub_(1)
    num_groups = _num_groups(num)
    of_numbers = torch.arange(dim) // _CHUNK % num_groups
    of_columns = torch.arange(num) % num_groups
    signs *= of_columns[:, None] == of_numbers
    return signs.mT  # column after column in memory, as it was drawn


def along_directions(rows: Tensor, num: int) -> Tensor:  # (n, d) -> (k, n)
    """(rows Ω)ᵀ, a group at a time."""
    num_groups, dim = _num_groups(num), rows.shape[1]
    weights = _by_group(dim, num, rows.dtype, rows.device)
    if num_groups == 1:
        return weights[0] @ rows.mT
    lacking = -dim % (num_groups * _CHUNK)
    padded = F.pad(rows, (0, lacking)) if lacking else rows
    chunks = padded.unflatten(1, (-1, num_groups, _CHUNK))
    grouped = chunks.permute(2, 0, 1, 3).flatten(2)  # (groups, n, numbers of each)
    along = torch.bmm(weights, grouped.mT)  # (groups, columns of each, n)
    return along.transpose(0, 1).flatten(0, 1)[:num]


@lru_cache(maxsize=64)
def _by_group(dim: int, num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is not zero of Ω: (groups, columns of each, numbers of each)."""
    omega, num_groups = directions(dim, num).mT, _num_groups(num)
    if num_groups == 1:
        return omega[None].to(device, dtype)
    padded = F.pad(omega, (0, -dim % (num_groups * _CHUNK), 0, -num % num_groups))
    columns = padded.unflatten(0, (-1, num_groups)).unflatten(2, (-1, num_groups, _CHUNK))
    own = columns.diagonal(dim1=1, dim2=3)  # (columns, chunks, numbers of a chunk, groups)
    found: Tensor = own.permute(3, 0, 1, 2).flatten(2).contiguous()
    return found.to(device, dtype)


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
