"""Statistics that are sums of tensors of one shape, which need nothing but that shape and `add`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from matsmerge.statistics.kinds.statistic import Form, Statistic, Storage, Sum, Target, check_parts


class TensorSum(Sum, ABC):
    """One tensor, to which `add` adds what it makes of rows."""

    def __init__(self, total: Tensor, num_rows: int = 0) -> None:
        self.total = total
        self.num_rows = num_rows

    def add_sum(self, other: Self) -> None:
        self.total = self.total + other.total
        self.num_rows += other.num_rows

    def parts(self) -> dict[str, Tensor]:
        return {"sum": self.total}

    def load(self, parts: Mapping[str, Tensor]) -> None:
        check_parts(parts, {"sum": tuple(self.total.shape)}, self.total.dtype)
        self.total = parts["sum"]

    def sums(self) -> list[tuple[Tensor, Form]]:
        return [(self.total, "full")]

    @classmethod
    def of_sums(cls, sums: Sequence[tuple[Tensor, Form]], num_rows: int) -> Self:
        return cls(sums[0][0], num_rows)


class TensorStatistic(Statistic[Target], ABC):
    """A statistic whose sums are of the type `sum_type`."""

    sum_type: ClassVar[type[TensorSum]]

    @abstractmethod
    def shape(self, target: Target) -> tuple[int, ...]:
        """The shape of a target's sum."""

    def new(self, target: Target, storage: Storage) -> Sum:
        zeros = torch.zeros(self.shape(target), dtype=storage.dtype, device=storage.device)
        return self.sum_type(zeros)

    def num_values(self, target: Target) -> int:
        return math.prod(self.shape(target))
