"""Statistics that are sums of tensors of one shape, which need nothing but that shape and `add`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from matsmerge.statistics.kinds.statistic import (
    Form,
    Statistic,
    Storage,
    Sum,
    Target,
    check_parts,
)


class TensorSum(Sum, ABC):
    """One tensor, to which `add` adds what it makes of rows."""

    def __init__(self, total: Tensor, num_rows: int = 0) -> None:
        self.total = total
        self.num_rows = num_rows

    def add_sum(self, other: "TensorSum") -> None:
        self.total = self.total + other.total
        self.num_rows += other.num_rows

    def parts(self) -> dict[str, Tensor]:
        return {"sum": self.total}

    def sums(self) -> list[tuple[Tensor, Form]]:
        return [(self.total, "full")]


class TensorStatistic(Statistic[Target], ABC):
    """A statistic whose sums are of the type `sum_type`."""

    sum_type: ClassVar[type[TensorSum]]

    @abstractmethod
    def shape(self, target: Target) -> tuple[int, ...]:
        """The shape of a target's sum."""

    def new(self, target: Target, storage: Storage) -> TensorSum:
        zeros = torch.zeros(self.shape(target), dtype=storage.dtype, device=storage.device)
        return self.sum_type(zeros)

    def of_parts(
        self, target: Target, parts: Mapping[str, Tensor], num_rows: int, dtype: torch.dtype
    ) -> TensorSum:
        check_parts(parts, {"sum": self.shape(target)}, dtype)
        return self.sum_type(parts["sum"], num_rows)

    def of_sums(self, sums: Sequence[tuple[Tensor, Form]], num_rows: int) -> TensorSum:
        return self.sum_type(sums[0][0], num_rows)

    def num_values(self, target: Target) -> int:
        return math.prod(self.shape(target))
