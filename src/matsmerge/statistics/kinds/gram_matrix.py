"""Gram matrices: G = mean over rows of z zᵀ, (in, in), z a row that a linear map receives.

Beside it is the mean of z, if the map has a bias: with a constant 1 appended to the input, weight
and bias are one map. Of an embedding's one-hot rows G is a diagonal, how often each token occurs.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from matsmerge.statistics.kinds.moment_sum import MomentStatistic
from matsmerge.statistics.kinds.statistic import (
    Arrays,
    InputStatistic,
    RunningSum,
    Storage,
    StoredTensor,
)
from matsmerge.statistics.kinds.tensor_sum import TensorSum
from matsmerge.statistics.linear_maps import LinearMap


class TokenSum(TensorSum):
    """The sum of zzᵀ over one-hot rows z, given as indices: how often each comes up."""

    def add(self, rows: Tensor, keep: Tensor | None = None) -> None:  # (rows,)
        indices = rows if keep is None else rows[keep]
        counts = torch.bincount(indices, minlength=len(self.total))
        self.total = self.total.to(counts.device) + counts
        self.num_rows += len(indices)

    def sums(self) -> list[StoredTensor]:
        return [(self.total.double(), "diagonal")]


class GramMatrix(MomentStatistic, InputStatistic):
    """Second moment of the inputs of every linear map, the mean of zzᵀ over real rows."""

    name = "gram"
    arrays: ClassVar[Arrays] = {
        "inputs": ("symmetric", "diagonal", "sketch", "wide"),
        "mean": ("full",),
    }
    title = "second moments of inputs (gram, kfac)"
    is_per_row = True

    def dim(self, target: LinearMap) -> int:
        return target.num_inputs

    def new(self, target: LinearMap, storage: Storage) -> RunningSum:
        if target.layout == "embedding":
            return TokenSum(torch.zeros(target.num_inputs, dtype=torch.long, device=storage.device))
        return super().new(target, storage)

    def add_up(self, sums: Sequence[StoredTensor]) -> StoredTensor:
        if sums[0][1] == "diagonal":  # counts of tokens, which were whole before they were means
            sums = [(values.round(), form) for values, form in sums]
        return super().add_up(sums)

    def has_sketch(self, target: LinearMap, rank: int | None) -> bool:
        return target.layout != "embedding" and super().has_sketch(target, rank)

    def num_values(self, target: LinearMap, rank: int | None = None) -> int:
        if target.layout == "embedding":
            return target.num_inputs
        return super().num_values(target, rank)


GRAM = GramMatrix()
