"""FP8 with scales: which numbers of a tensor share a scale, and numbers brought into that form."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from matsmerge.checkpoints.checkpoint import TensorSpec

_BAND_ELEMENTS = 1 << 16  # rows with scales of their own are encoded together up to this


@dataclass(frozen=True)
class Scaled:
    """How a float8 tensor is scaled: `rows` x `columns` numbers share a scale.

    Scales are in the tensor whose name has `ending` added to it; without one, numbers stand for
    themselves. Where all numbers share one scale, its shape is `single`.
    """

    dtype: torch.dtype
    ending: str | None = None
    rows: int = 1
    columns: int = 1
    single: tuple[int, ...] | None = None
    is_flat: bool = False  # scales of rows are a vector
    scale_dtype: torch.dtype = torch.float32
    has_powers: bool = False  # scales are powers of 2

    def specs(self, name: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """The tensors to write."""
        return {name: TensorSpec(self.dtype, shape), f"{name}{self.ending}": self.scales_of(shape)}

    def scales_of(self, shape: tuple[int, ...]) -> TensorSpec:
        """The tensor of scales beside a tensor."""
        if self.single is not None:
            return TensorSpec(self.scale_dtype, self.single)
        *outer, num_rows, length = shape
        grid = (*outer, ceil(num_rows / self.rows), ceil(length / self.columns))
        return TensorSpec(self.scale_dtype, grid[:-1] if self.is_flat else grid)

    def band_rows(self, shape: tuple[int, ...]) -> int:
        """Rows that are encoded together; all, if there is one scale."""
        *outer, num_rows, length = (1, *shape)
        if self.single is not None:
            return prod(outer) * num_rows
        return min(self.rows * max(1, _BAND_ELEMENTS // max(1, self.rows * length)), num_rows)

    def encoding_bytes(self, shape: tuple[int, ...]) -> int:
        """Memory that writing takes: those rows in float32, thrice."""
        return 3 * 4 * self.band_rows(shape) * shape[-1]


def encode_fp8(values: Tensor, scaled: Scaled) -> tuple[Tensor, Tensor]:
    """A matrix in FP8, and its scales (lines, columns): largest magnitude / that of the dtype.

    In float32, rounded to nearest, ties to even. Numbers are divided by scales as they are stored.
    """
    num_rows, length = values.shape
    rows, columns = (
        (num_rows, length) if scaled.single is not None else (scaled.rows, scaled.columns)
    )
    padded = pad(values.float(), (0, -length % columns, 0, -num_rows % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, -1, columns)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(scaled.dtype).max
    if scaled.has_powers:  # the next one, with which nothing is too large
        fraction, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (fraction == 0.5).int())
    scales = scales.masked_fill_(scales == 0, 1).to(scaled.scale_dtype)
    quotients = (blocks / scales.float()[:, None, :, None]).view(padded.shape)
    return quotients[:num_rows, :length].to(scaled.dtype), scales


class ScaledWriter:
    """Takes a tensor's values in their order, and writes them in FP8 with their scales.

    Held are the rows that are encoded together.
    """

    def __init__(
        self,
        scaled: Scaled,
        name: str,
        shape: tuple[int, ...],
        write: Callable[[str, int, Tensor], None],
    ) -> None:
        *_, self._num_rows, self._length = (1, *shape)
        self._scaled, self._name, self._write = scaled, name, write
        self._band_rows = scaled.band_rows(shape)
        self._begin = self._num_held = self._num_scales = 0
        self._held = torch.empty(0)
        self._start_band()

    def _start_band(self) -> None:
        rows = self._band_rows
        if self._scaled.single is None:  # a band ends with its matrix
            rows = min(rows, self._num_rows - self._begin // self._length % self._num_rows)
        if len(self._held) != rows * self._length:
            self._held = torch.empty(rows * self._length)

    def take(self, start: int, values: Tensor) -> None:
        """Take the values from element `start` on, which are the next."""
        assert start == self._begin + self._num_held, "values come in their order"
        while len(values):
            part = values[: len(self._held) - self._num_held]
            self._held[self._num_held : self._num_held + len(part)] = part
            self._num_held += len(part)
            values = values[len(part) :]
            if self._num_held == len(self._held):
                self._finish_band()

    def _finish_band(self) -> None:
        encoded, scales = encode_fp8(self._held.view(-1, self._length), self._scaled)
        self._write(self._name, self._begin, encoded.flatten())
        self._write(f"{self._name}{self._scaled.ending}", self._num_scales, scales.flatten())
        self._num_scales += scales.numel()
        self._begin += self._num_held
        self._num_held = 0
        self._start_band()
