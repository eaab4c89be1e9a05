"""Statistics that are sums of tensors of one shape, which need nothing but that shape and `add`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from matsmerge.statistics.kinds.statistic import (
    RunningSum,
    Statistic,
    Storage,
    StoredTensor,
    Target,
    check_parts,
)


class TensorSum(RunningSum, ABC):
    """One tensor, to which `add` adds what it makes of rows."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def parts(self) -> dict[str, Tensor]:
        return {"sum": self.total}

    def load(self, parts: Mapping[str, Tensor]) -> None:
        check_parts(parts, {"sum": tuple(self.total.shape)}, self.total.dtype)
        self.total = parts["sum"]

    def sums(self) -> list[StoredTensor]:
        return [(self.total, "full")]


class TensorStatistic(Statistic[Target], ABC):
    """A statistic whose sums are of the type `sum_type`."""

    sum_type: ClassVar[type[TensorSum]]

    @abstractmethod
    def shape(self, target: Target) -> tuple[int, ...]:
        """The shape of a target's sum."""

    def new(self, target: Target, storage: Storage) -> RunningSum:
        zeros = torch.zeros(self.shape(target), dtype=storage.dtype, device=storage.device)
        return self.sum_type(zeros)

    def num_values(self, target: Target, rank: int | None = None) -> int:  # noqa: ARG002
        return math.prod(self.shape(target))
