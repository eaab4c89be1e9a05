"""Second moments that are kept by a rank: sums of sketches, and what is made of them in the end.

While rows are added there is Y = G Ω (d, k) and, as one more column, the diagonal of G, which gives
the exact trace: the form `wide`. These sums add up exactly. What is kept of them, the form
`sketch`, is [B | diagonal] (d, r + 1), r leading directions with G ~ B Bᵀ. Of inputs to which
biases may be joined, G is the moment of [z; 1].
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from matsmerge.linalg.nystrom import (
    along_directions,
    directions,
    leading_of_moment,
    leading_of_sketch,
    leading_of_sum,
)
from matsmerge.statistics.kinds.statistic import RunningSum, StoredTensor, check_parts

_SQUARED_ROWS = 32  # at once


class SketchSum(RunningSum):
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
        real = rows if keep is None else torch.index_select(rows, 0, keep)
        z = real.to(self._dtype)
        products = along_directions(z, self._num)  # (k, rows)
        if self._keeps_mean:
            # One more direction is the constant's own: its column of G is the mean.
            last = directions(self._dim + 1, self._num)[-1:].mT.to(products)
            products = torch.cat([products + last, products.new_ones(1, len(z))])
            self._total[:-1, -1].add_(products.sum(1))
            self._total[-1, -1] += len(z)
        # Not by +=, which writes what it has added to a part once more.
        self._total[:-1, : self._dim].add_(products @ z)
        self._total[-1, : self._dim].add_(_sum_of_squares(z))
        self.num_rows += len(z)

    def parts(self) -> dict[str, Tensor]:
        return {"sketch": self._total}

    def load(self, parts: Mapping[str, Tensor]) -> None:
        has_mean = "sketch" in parts and parts["sketch"].shape[-1:] == (self._dim + 1,)
        shape = self._num + has_mean + 1, self._dim + has_mean
        check_parts(parts, {"sketch": shape}, torch.float64)
        self._total, self._keeps_mean = parts["sketch"], has_mean

    def sums(self) -> list[StoredTensor]:
        sketch = torch.cat([self._total[: self._num], self._total[-1:]]).mT
        found: list[StoredTensor] = [(sketch, "wide")]
        if self._keeps_mean:
            found.append((self._total[self._num, : self._dim], "full"))
        return found


def _sum_of_squares(z: Tensor) -> Tensor:  # (rows, d) -> (d,)
    """Over the rows, some at a time: squares of all would take memory as large as the input."""
    sums = z.new_zeros(_SQUARED_ROWS, z.shape[1])
    for some in z.split(_SQUARED_ROWS):
        sums[: len(some)].addcmul_(some, some)
    return sums.sum(0)


def kept_of_wide(wide: Tensor, rank: int) -> Tensor:  # (d, k + 1) -> (d, r + 1)
    """The sketch that is kept, from Y and the diagonal."""
    diagonal = wide[:, -1:].double()
    return torch.cat([leading_of_sketch(wide[:, :-1], float(diagonal.sum()), rank), diagonal], 1)


def kept_of_moment(moment: Tensor, rank: int, num: int | None) -> Tensor:  # (d, d) -> (d, r + 1)
    """The sketch that is kept, from the whole moment: by `num` columns, exactly where None."""
    diagonal = moment.diagonal()[:, None]
    if num is None:
        return torch.cat([leading_of_moment(moment, rank), diagonal], 1)
    y = moment @ directions(len(moment), num).to(moment)
    return kept_of_wide(torch.cat([y, diagonal], 1), rank)


def scaled(kept: Tensor, scale: float) -> Tensor:  # (d, r + 1)
    """The sketch of a moment times a number."""
    return torch.cat([kept[:, :-1] * scale**0.5, kept[:, -1:] * scale], 1)


def sum_of_kept(parts: Sequence[Tensor]) -> Tensor:  # (d, r + 1) each
    """The sketch of a sum of moments: the leading directions of the sum of all B Bᵀ."""
    first, *others = parts
    if not others:
        return first
    factors = [part[:, :-1] for part in parts]
    return torch.cat([leading_of_sum(factors), sum((p[:, -1:] for p in others), first[:, -1:])], 1)


def without_constant(stored: StoredTensor, mean: Tensor) -> Tensor:  # (d + 1, ...), (d,)
    """What is of inputs z from what is of [z; 1]."""
    values, form = stored
    if form == "sketch":
        return values[:-1]
    last = directions(len(values), values.shape[1] - 1)[-1].double()
    y = values[:-1, :-1] - mean.double()[:, None] * last
    return torch.cat([y, values[:-1, -1:]], 1)
