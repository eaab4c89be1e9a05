"""Blocks of the Fisher information for vectors: F = 1/N sum over examples of g gᵀ, (d, d).

g is the gradient of one example's loss with respect to a vector, N the number of examples.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from matsmerge.linalg.triangle import UpperSum, pack_upper, unpack_upper
from matsmerge.statistics.kinds.moment_sum import MomentSum
from matsmerge.statistics.kinds.statistic import (
    Arrays,
    Form,
    GradientStatistic,
    GradientSum,
    Storage,
    check_parts,
)
from matsmerge.statistics.parameters import Owned

_NOT_A_VECTOR = "not a vector"


class FisherBlock(GradientStatistic):
    """Mean over examples of the gradient's outer product, for each vector parameter."""

    name = "block_fisher"
    arrays: ClassVar[Arrays] = {"block_fisher": ("symmetric", "rows")}
    title = "blocks of the Fisher information"
    expected_reasons = (_NOT_A_VECTOR,)

    def new(self, target: Owned, storage: Storage) -> "BlockSum":  # noqa: ARG002
        return BlockSum(target.parameter.numel())

    def of_parts(
        self, target: Owned, parts: Mapping[str, Tensor], num_rows: int, dtype: torch.dtype
    ) -> "BlockSum":
        dim = target.parameter.numel()
        if "gradients" not in parts:
            MomentSum.of_parts(1, dim, parts, num_rows, dtype)
            return BlockSum(dim, UpperSum.of_parts(parts))
        num = parts["gradients"].shape[0] if parts["gradients"].ndim else 0
        check_parts(parts, {"gradients": (num, dim)}, dtype)
        return BlockSum(dim, rows=[parts["gradients"]])

    def of_sums(
        self,
        sums: Sequence[tuple[Tensor, Form]],
        num_rows: int,  # noqa: ARG002
    ) -> "BlockSum":
        values, form = sums[0]
        if form == "symmetric":
            upper = unpack_upper(values)
            return BlockSum(len(upper), UpperSum(upper))
        block = BlockSum(values.shape[1])
        block.add(values)
        return block

    def num_values(self, target: Owned) -> int:
        return target.parameter.numel()  # of each gradient, while there are few

    def refuses(self, target: Owned) -> str | None:
        return None if target.is_vector else _NOT_A_VECTOR


class BlockSum(GradientSum):
    """Sum of ggᵀ over gradients, kept as the gradients themselves while they take less room."""

    def __init__(
        self, dim: int, total: UpperSum | None = None, rows: Sequence[Tensor] = ()
    ) -> None:
        self._dim = dim
        self._sum = total
        self._rows = list(rows)

    def add(self, rows: Tensor, keep: Tensor | None = None) -> None:  # (rows, d)
        assert keep is None
        if self._sum is not None:
            self._sum.add(rows)
            return
        self._rows.append(rows.clone())
        if 2 * sum(map(len, self._rows)) > self._dim + 1:
            self._sum = UpperSum(rows.new_zeros(self._dim, self._dim))
            # At once: in what portions they came does not matter then.
            self._sum.add(torch.cat(self._rows))
            self._rows = []

    def add_sum(self, other: "BlockSum") -> None:
        if other._sum is not None:
            upper = other._sum.upper
            self._sum = UpperSum(upper if self._sum is None else self._sum.upper + upper)
            for rows in self._rows:
                self._sum.add(rows)
            self._rows = []
        for rows in other._rows:
            self.add(rows)

    def parts(self) -> dict[str, Tensor]:
        return {"gradients": torch.cat(self._rows)} if self._sum is None else self._sum.parts()

    def sums(self) -> list[tuple[Tensor, Form]]:
        if self._sum is None:
            return [(torch.cat(self._rows), "rows")]
        return [(pack_upper(self._sum.upper), "symmetric")]

    def comparable(self) -> Tensor:
        if self._sum is not None:
            return self._sum.upper.diagonal()
        return torch.cat(self._rows).square().sum(0)


BLOCK_FISHER = FisherBlock()
