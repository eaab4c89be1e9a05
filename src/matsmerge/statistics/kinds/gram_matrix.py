"""Gram matrices: G = mean over rows of z zᵀ, (in, in), z a row that a linear map receives.

Beside it is the mean of z, if the map has a bias: with a constant 1 appended to the input, weight
and bias are one map. Of an embedding's one-hot rows G is a diagonal, how often each token occurs.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from matsmerge.statistics.kinds.moment_sum import MomentSum
from matsmerge.statistics.kinds.statistic import (
    Arrays,
    Form,
    InputStatistic,
    Storage,
    Sum,
    check_parts,
)
from matsmerge.statistics.kinds.tensor_sum import TensorSum
from matsmerge.statistics.linear_maps import LinearMap


class GramMatrix(InputStatistic):
    """Second moment of the inputs of every linear map, the mean of zzᵀ over real rows."""

    name = "gram"
    arrays: ClassVar[Arrays] = {"inputs": ("symmetric", "diagonal"), "mean": ("full",)}
    title = "second moments of inputs (gram, kfac)"
    is_per_row = True

    def new(self, target: LinearMap, storage: Storage) -> Sum:
        if target.layout == "embedding":
            return TokenSum(torch.zeros(target.num_inputs, dtype=torch.long, device=storage.device))
        return MomentSum.new(target.num_groups, target.num_inputs, storage)

    def of_parts(
        self, target: LinearMap, parts: Mapping[str, Tensor], num_rows: int, dtype: torch.dtype
    ) -> Sum:
        if target.layout == "embedding":
            check_parts(parts, {"sum": (target.num_inputs,)}, torch.int64)
            return TokenSum(parts["sum"], num_rows)
        return MomentSum.of_parts(target.num_groups, target.num_inputs, parts, num_rows, dtype)

    def of_sums(self, sums: Sequence[tuple[Tensor, Form]], num_rows: int) -> Sum:
        values, form = sums[0]
        if form == "diagonal":
            return TokenSum(values.round().long(), num_rows)
        return MomentSum.of_sums(sums, num_rows)

    def num_values(self, target: LinearMap) -> int:
        if target.layout == "embedding":
            return target.num_inputs
        return target.num_groups * target.num_inputs**2 // 2


class TokenSum(TensorSum):
    """The sum of zzᵀ over one-hot rows z, given as indices: how often each comes up."""

    def add(self, rows: Tensor, keep: Tensor | None = None) -> None:  # (rows,)
        indices = rows if keep is None else rows[keep]
        counts = torch.bincount(indices, minlength=len(self.total))
        self.total = self.total.to(counts.device) + counts
        self.num_rows += len(indices)

    def sums(self) -> list[tuple[Tensor, Form]]:
        return [(self.total.double(), "diagonal")]


GRAM = GramMatrix()
