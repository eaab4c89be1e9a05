"""Symmetric matrices stored as their upper triangle, row after row."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ENOUGH_ROWS = 1024
_PANEL = 64


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
    for own, square in zip(
        packed.reshape(-1, packed.shape[-1]), matrix.view(-1, d, d), strict=True
    ):
        _put_rows(own.contiguous(), square)
        # Below the diagonal a panel at a time: column by column would miss the cache.
        for i in range(0, d, _PANEL):
            j = min(i + _PANEL, d)
            corner = square[i:j, i:j]
            corner.copy_(corner.triu() + corner.triu(1).mT)
            square[j:, i:j] = square[i:j, j:].mT
    return matrix


def _put_rows(packed: Tensor, square: Tensor) -> None:
    """Write the rows of a triangle; through NumPy, for which a row is little work."""
    d = len(square)
    rows: Any = square
    values: Any = packed
    if packed.device.type == "cpu":
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[packed.element_size()]
        rows, values = square.view(bits).numpy(), packed.view(bits).numpy()
    position = 0
    for i in range(d):
        rows[i, i:] = values[position : position + d - i]
        position += d - i


def triangle_dim(num_packed: int) -> int:
    """The `d` of a triangle with this many entries; a `ValueError` if there is none."""
    if not is_triangle(num_packed):
        raise ValueError(f"{num_packed} values are no triangle of a matrix")
    return (math.isqrt(8 * num_packed + 1) - 1) // 2


def is_triangle(num_packed: int) -> bool:
    """Is there a matrix whose triangle has this many entries?"""
    d = (math.isqrt(8 * num_packed + 1) - 1) // 2
    return d * (d + 1) // 2 == num_packed


class UpperSum:
    """A running sum of `zᵀ z` over rows z, of which only the upper triangle is computed.

    That is half of the products of a plain matrix multiplication; a panel of rows at a time is
    still wide enough for it to run at full speed. Rows are gathered until there are as many as
    they are wide, or enough: with few, reading and writing the sum takes longer than the products.
    """

    def __init__(self, sums: Tensor, first: Tensor | None = None) -> None:
        self._sums = sums  # (d, d) or (groups, d, d); below the diagonal: anything
        self._first = first  # (d,) or (groups, d), the sum of the rows themselves, if wanted
        self._rows: Tensor | None = None  # (some, d), of which the first `_num_rows` are filled
        self._num_rows = 0

    @property
    def upper(self) -> Tensor:
        """The sum so far; its upper triangle, and anything below."""
        self._settle()
        return self._sums

    @property
    def first(self) -> Tensor | None:
        """The sum of the rows."""
        self._settle()
        return self._first

    def add(self, z: Tensor, keep: Tensor | None = None) -> None:  # (rows, d), (groups, rows, d)
        """Add rows, or those with the indices `keep`."""
        if self._sums.device != z.device:
            self._sums = self._sums.to(z.device)
            self._first = None if self._first is None else self._first.to(z.device)
            self._rows = None if self._rows is None else self._rows.to(z.device)
        d = z.shape[-1]
        num_rows = z.shape[-2] if keep is None else len(keep)
        enough = min(d, ENOUGH_ROWS)
        if z.ndim == 3 or num_rows >= enough:
            self._multiply((z if keep is None else z[keep]).to(self._sums.dtype))
            return
        if self._rows is None:
            self._rows = self._sums.new_empty(enough, d)
        if self._num_rows + num_rows > enough:
            self._settle()
        room = self._rows[self._num_rows : self._num_rows + num_rows]
        if keep is None:
            room.copy_(z)
        elif z.dtype == room.dtype:
            torch.index_select(z, 0, keep, out=room)
        else:
            room.copy_(z[keep])
        self._num_rows += num_rows

    def _settle(self) -> None:
        if self._rows is not None and self._num_rows:
            self._multiply(self._rows[: self._num_rows])
            self._num_rows = 0

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
        if self._first is not None:
            self._first += z.sum(-2)

    def parts(self) -> dict[str, Tensor]:
        """All that the sum is made of so far: also rows that are gathered and not yet multiplied.

        Taking them changes nothing. `of_parts` makes a sum that goes on exactly as this one.
        """
        found = {"upper": pack_upper(self._sums)}
        if self._first is not None:
            found["first"] = self._first
        if self._rows is not None and self._num_rows:
            found["rows"] = self._rows[: self._num_rows]
        return found

    @classmethod
    def of_parts(cls, parts: Mapping[str, Tensor]) -> "UpperSum":
        total = cls(unpack_upper(parts["upper"]), parts.get("first"))
        if "rows" in parts:
            num, d = parts["rows"].shape
            total._rows = parts["rows"].new_empty(min(d, ENOUGH_ROWS), d)
            total._rows[:num] = parts["rows"]
            total._num_rows = num
        return total

    def clone(self) -> "UpperSum":
        first = self.first
        return UpperSum(self.upper.clone(), None if first is None else first.clone())

    def comparable(self) -> Tensor:
        """What is the same for sums of the same rows."""
        return self.upper.triu()


class UpperProbe(UpperSum):
    """`zᵀ z` times one random vector: small, and enough to tell two sums apart."""

    def __init__(self, sums: Tensor) -> None:  # (d,) or (groups, d)
        super().__init__(sums)
        generator = torch.Generator().manual_seed(0)
        d = sums.shape[-1]
        self._direction = torch.randn(d, generator=generator, dtype=sums.dtype).to(sums.device)

    def add(self, z: Tensor, keep: Tensor | None = None) -> None:
        z = (z if keep is None else z[keep]).to(self._sums.dtype)
        self._sums += (z.mT @ (z @ self._direction)[..., None])[..., 0]

    def clone(self) -> "UpperProbe":
        return UpperProbe(self._sums.clone())

    def comparable(self) -> Tensor:
        return self._sums
