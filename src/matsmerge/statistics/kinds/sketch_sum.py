"""Sums of second moments that are kept as sketches, of a size that goes with a rank.

Of G (d, d) a sketch has Y = G Ω (d, k) and, as one more column, the diagonal of G, which gives the
exact trace. Of inputs to which biases may be joined, G is the moment of [z; 1].
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from matsmerge.linalg.nystrom import directions, factor, sketch_of_factor
from matsmerge.statistics.kinds.statistic import Stored, Sum, check_parts


class SketchSum(Sum):
    """Sums over rows z of z (zᵀ Ω), of z * z and, if wanted, of z.

    Products are in the precision of full second moments, sums of batches in float64.
    """

    def __init__(self, dim: int, num: int, dtype: torch.dtype, *, keeps_mean: bool) -> None:
        self._dim = dim
        self._num = num
        self._dtype = dtype
        self._keeps_mean = keeps_mean
        # Transposed: (k, d), perhaps the mean's row, and the diagonal's.
        self._total = torch.zeros(num + keeps_mean + 1, dim + keeps_mean, dtype=torch.float64)

    def add(self, rows: Tensor, keep: Tensor | None = None) -> None:  # (rows, d)
        if self._total.device != rows.device:
            self._total = self._total.to(rows.device)
        num_rows = len(rows) if keep is None else len(keep)
        if 4 * num_rows < 3 * len(rows):  # few rows are copied, much padding is not multiplied
            rows, keep = rows[keep], None
        z = rows.to(self._dtype)
        weight, constant = _weights(self._dim, self._num, self._keeps_mean, z.dtype, z.device)
        products = F.linear(z, weight, constant)  # (rows, k)
        is_real = z.new_ones(len(z))
        if keep is not None:
            is_real = z.new_zeros(len(z)).index_fill_(0, keep, 1)
            padding = (is_real == 0).nonzero()[:, 0]
            if not bool(products[padding].isfinite().all()):  # zero times it would not be zero
                self.add(rows[keep])
                return
            products[padding] = 0
        self._total[:-1, : self._dim] += products.mT @ z
        self._total[-1, : self._dim] += is_real @ z.square()
        if self._keeps_mean:
            self._total[:-1, -1] += products.sum(0)
            self._total[-1, -1] += num_rows
        self.num_rows += num_rows

    def parts(self) -> dict[str, Tensor]:
        return {"sketch": self._total}

    def load(self, parts: Mapping[str, Tensor]) -> None:
        has_mean = "sketch" in parts and parts["sketch"].shape[-1:] == (self._dim + 1,)
        shape = self._num + has_mean + 1, self._dim + has_mean
        check_parts(parts, {"sketch": shape}, torch.float64)
        self._total, self._keeps_mean = parts["sketch"], has_mean

    def sums(self) -> list[Stored]:
        sketch = torch.cat([self._total[: self._num], self._total[-1:]]).mT
        found: list[Stored] = [(sketch, "sketch")]
        if self._keeps_mean:
            found.append((self._total[self._num, : self._dim], "full"))
        return found


@lru_cache(maxsize=64)
def _weights(
    dim: int, num: int, keeps_mean: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:  # (k, d), (k,)
    """Ω as the weight of a linear layer, and the row of the constant input as its bias.

    With the mean there is one more direction, the constant's own: its column of G is the mean.
    """
    omega = directions(dim + keeps_mean, num).mT.to(device, dtype)
    if not keeps_mean:
        return omega, None
    omega = torch.cat([omega, F.one_hot(torch.tensor([dim], device=device)).to(dtype)])
    return omega[:, :dim].contiguous(), omega[:, dim].contiguous()


def factored(mean: Tensor, seed: int) -> Tensor:  # (d, k + 1), of Y and the diagonal
    """A sketch as it is stored, with B in place of Y, of which little is lost by rounding."""
    return torch.cat([factor(mean[:, :-1], seed), mean[:, -1:].double()], 1)


def multiplied(stored: Tensor, seed: int, num: int | None = None) -> Tensor:  # (d, k + 1)
    """What `factored` was made of, or the same of fewer directions."""
    y = sketch_of_factor(stored[:, :-1], num, seed)
    return torch.cat([y, stored[:, -1:].double()], 1)


def without_constant(sketch: Tensor, mean: Tensor, seed: int) -> Tensor:  # (d + 1, k + 1), (d,)
    """The sketch of inputs z from that of [z; 1], of the same directions."""
    last = directions(len(sketch), sketch.shape[1] - 1, seed)[-1].double()
    y = sketch[:-1, :-1] - mean.double()[:, None] * last
    return torch.cat([y, sketch[:-1, -1:]], 1)
