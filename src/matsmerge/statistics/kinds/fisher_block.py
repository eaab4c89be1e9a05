"""Blocks of the Fisher information for vectors: F = 1/N sum over examples of g gᵀ, (d, d).

g is the gradient of one example's loss with respect to a vector, N the number of examples.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from matsmerge.linalg.triangle import UpperSum, triangle_dim, unpack_upper
from matsmerge.statistics.kinds.moment_sum import MomentSum
from matsmerge.statistics.kinds.statistic import (
    Arrays,
    GradientStatistic,
    RunningSum,
    Storage,
    StoredTensor,
    check_parts,
)
from matsmerge.statistics.parameters import Owned

_NOT_A_VECTOR = "not a vector"


class BlockSum(RunningSum):
    """Sum of ggᵀ over gradients, kept as the gradients themselves while they take less room."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        self._dim = dim
        self._dtype = dtype
        self._moment: MomentSum | None = None
        self._rows: list[Tensor] = []  # until there is a moment

    def add(self, rows: Tensor, keep: Tensor | None = None) -> None:  # (rows, d)
        assert keep is None
        if self._moment is not None:
            self._moment.add(rows)
            return
        self._rows.append(rows.clone())
        if 2 * sum(map(len, self._rows)) > self._dim + 1:
            gathered = torch.cat(self._rows)
            # At once: in what portions they came does not matter then.
            self._become(MomentSum(UpperSum(gathered.new_zeros(self._dim, self._dim))), [gathered])

    def _become(self, moment: MomentSum, rows: Sequence[Tensor]) -> None:
        for some in rows:
            moment.add(some)
        self._moment, self._rows = moment, []

    def add_triangle(self, packed: Tensor) -> None:  # (d (d + 1) / 2,)
        """Add a sum of other gradients."""
        upper = unpack_upper(packed)
        if self._moment is not None:
            upper = self._moment.upper + upper
        self._become(MomentSum(UpperSum(upper)), self._rows)

    def parts(self) -> dict[str, Tensor]:
        if self._moment is None:
            return {"gradients": torch.cat(self._rows)}
        return self._moment.parts()

    def load(self, parts: Mapping[str, Tensor]) -> None:
        if "gradients" in parts:
            num = len(parts["gradients"]) if parts["gradients"].ndim else 0
            check_parts(parts, {"gradients": (num, self._dim)}, self._dtype)
            self._rows = [parts["gradients"]]
        else:
            self._moment = MomentSum(UpperSum(torch.zeros(self._dim, self._dim, dtype=self._dtype)))
            self._moment.load(parts)

    def sums(self) -> list[StoredTensor]:
        return [(torch.cat(self._rows), "rows")] if self._moment is None else self._moment.sums()

    def comparable(self) -> Tensor:
        if self._moment is not None:
            return self._moment.upper.diagonal()
        return torch.cat(self._rows).square().sum(0)


class FisherBlock(GradientStatistic):
    """Mean over examples of the gradient's outer product, for each vector parameter."""

    name = "block_fisher"
    arrays: ClassVar[Arrays] = {"block_fisher": ("symmetric", "rows")}
    title = "blocks of the Fisher information"
    expected_reasons = (_NOT_A_VECTOR,)

    def new(self, target: Owned, storage: Storage) -> BlockSum:
        return BlockSum(target.parameter.numel(), storage.dtype)

    def add_up(self, sums: Sequence[StoredTensor]) -> StoredTensor:
        values, form = sums[0]
        dim = values.shape[1] if form == "rows" else triangle_dim(len(values))
        block = BlockSum(dim, values.dtype)
        for values, form in sums:
            if form == "rows":
                block.add(values)
            else:
                block.add_triangle(values)
        return block.sums()[0]

    def num_values(self, target: Owned, rank: int | None = None) -> int:  # noqa: ARG002
        return target.parameter.numel()  # of each gradient, while there are few

    def refuses(self, target: Owned) -> str | None:
        return None if target.is_vector else _NOT_A_VECTOR


BLOCK_FISHER = FisherBlock()
