"""Symmetric matrices stored as their upper triangle, row after row."""

import math

import torch
from torch import Tensor


def pack_upper(matrix: Tensor) -> Tensor:  # (..., d, d) -> (..., d (d + 1) / 2)
    """The upper triangle of a symmetric matrix; what is below it is not looked at."""
    d = matrix.shape[-1]
    packed = matrix.new_empty(*matrix.shape[:-2], d * (d + 1) // 2)
    position = 0
    for i in range(d):
        packed[..., position : position + d - i] = matrix[..., i, i:]
        position += d - i
    return packed


def unpack_upper(packed: Tensor) -> Tensor:  # (..., d (d + 1) / 2) -> (..., d, d)
    """The symmetric matrix of an upper triangle."""
    d = triangle_dim(packed.shape[-1])
    matrix = packed.new_empty(*packed.shape[:-1], d, d)
    position = 0
    for i in range(d):
        row = packed[..., position : position + d - i]
        matrix[..., i, i:] = row
        matrix[..., i:, i] = row
        position += d - i
    return matrix


def triangle_dim(num_packed: int) -> int:
    """The `d` of a triangle with this many entries; a `ValueError` if there is none."""
    d = (math.isqrt(8 * num_packed + 1) - 1) // 2
    if d * (d + 1) // 2 != num_packed:
        raise ValueError(f"{num_packed} values are no triangle of a matrix")
    return d


class UpperSum:
    """A running sum of `zᵀ z` over rows z, of which only the upper triangle is computed.

    That is half of the products of a plain matrix multiplication; a panel of rows at a time is
    still wide enough for it to run at full speed. Rows are gathered until there are as many as
    they are wide: with fewer, reading and writing the sum takes longer than the products.
    """

    def __init__(self, sums: Tensor) -> None:
        self._sums = sums  # (d, d) or (groups, d, d); below the diagonal: anything
        self._rows: Tensor | None = None  # (d, d), of which the first `_num_rows` are filled
        self._num_rows = 0

    @property
    def upper(self) -> Tensor:
        """The sum so far; its upper triangle, and anything below."""
        if self._rows is not None and self._num_rows:
            self._multiply(self._rows[: self._num_rows])
            self._num_rows = 0
        return self._sums

    def add(self, z: Tensor) -> None:  # (rows, d) or (groups, rows, d)
        z = z.to(self._sums.dtype)
        if self._sums.device != z.device:
            self._sums = self.upper.to(z.device)
            self._rows = None
        d = z.shape[-1]
        if z.ndim == 3 or len(z) >= d:
            self._multiply(z)
            return
        if self._rows is None:
            self._rows = torch.empty_like(self._sums)
        while len(z):
            taken = z[: d - self._num_rows]
            self._rows[self._num_rows : self._num_rows + len(taken)] = taken
            self._num_rows += len(taken)
            z = z[len(taken) :]
            if self._num_rows == d:
                self._sums = self.upper

    def _multiply(self, z: Tensor) -> None:
        d = z.shape[-1]
        panel = 128 if d < 1024 else 256
        for i in range(0, d, panel):
            out = self._sums[..., i : i + panel, i:]
            left = z[..., i : i + panel].mT
            if z.ndim == 2:
                torch.addmm(out, left, z[:, i:], out=out)
            else:
                torch.baddbmm(out, left, z[..., i:], out=out)

    def clone(self) -> "UpperSum":
        return UpperSum(self.upper.clone())
