"""Sums of second moments, which several statistics are made of."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from matsmerge.linalg.nystrom import is_smaller, num_columns
from matsmerge.linalg.triangle import ENOUGH_ROWS, UpperProbe, UpperSum, pack_upper
from matsmerge.statistics.kinds.sketch_sum import SketchSum, sum_of_kept
from matsmerge.statistics.kinds.statistic import (
    MapStatistic,
    RunningSum,
    Storage,
    StoredTensor,
    check_parts,
)
from matsmerge.statistics.linear_maps import LinearMap


class MomentSum(RunningSum):
    """Sums over rows z of zzᵀ and, if wanted, of z."""

    def __init__(self, total: UpperSum, num_rows: int = 0) -> None:
        self._sum = total  # (d, d) or (groups, d, d)
        self.num_rows = num_rows

    @property
    def upper(self) -> Tensor:
        """The second moment; below the diagonal: anything."""
        return self._sum.upper

    def add(self, rows: Tensor, keep: Tensor | None = None) -> None:  # (rows, d), (groups, rows, d)
        self._sum.add(rows, keep)
        self.num_rows += rows.shape[-2] if keep is None else len(keep)

    def parts(self) -> dict[str, Tensor]:
        return self._sum.parts()

    def load(self, parts: Mapping[str, Tensor]) -> None:
        *groups, dim, _ = self.upper.shape
        shapes: dict[str, tuple[int, ...]] = {"upper": (*groups, dim * (dim + 1) // 2)}
        if "first" in parts:
            shapes["first"] = (*groups, dim)
        if "rows" in parts:
            num_rows = len(parts["rows"]) if parts["rows"].ndim else 0
            shapes["rows"] = (min(num_rows, dim, ENOUGH_ROWS), dim)
        check_parts(parts, shapes, self.upper.dtype)
        self._sum = UpperSum.of_parts(parts)

    def sums(self) -> list[StoredTensor]:
        found: list[StoredTensor] = [(pack_upper(self.upper), "symmetric")]
        return found if self._sum.first is None else [*found, (self._sum.first, "full")]

    def comparable(self) -> Tensor:
        return self._sum.comparable()

    def clone(self) -> "MomentSum":
        return MomentSum(self._sum.clone(), self.num_rows)


class MomentStatistic(MapStatistic, ABC):
    """A statistic of linear maps whose sums are second moments, or sketches of them."""

    @abstractmethod
    def dim(self, target: LinearMap) -> int:
        """How long the rows are, of each group."""

    def new(self, target: LinearMap, storage: Storage) -> RunningSum:
        groups = (target.num_groups,) if target.num_groups > 1 else ()
        shape = (*groups, self.dim(target))
        first = torch.zeros(shape, dtype=storage.dtype, device=storage.device)
        if storage.is_trial:
            return MomentSum(UpperProbe(first))
        num = self.num_columns(target, storage.rank)
        if num is not None:
            return SketchSum(shape[-1], num, storage.dtype, keeps_mean=storage.keeps_mean)
        sums = torch.zeros(*shape, shape[-1], dtype=storage.dtype, device=storage.device)
        return MomentSum(UpperSum(sums, first if storage.keeps_mean else None))

    def add_up(self, sums: Sequence[StoredTensor]) -> StoredTensor:
        if sums[0][1] == "sketch":
            return sum_of_kept([values for values, _ in sums]), "sketch"
        return super().add_up(sums)

    def has_sketch(self, target: LinearMap, rank: int | None) -> bool:
        """Is a target's moment kept by a rank, and not whole?"""
        is_one = target.num_groups == 1
        return rank is not None and is_one and is_smaller(self.dim(target), rank)

    def num_columns(self, target: LinearMap, rank: int | None) -> int | None:
        """How many columns the sketch has that is summed up; None where the whole moment is."""
        if rank is None or not self.has_sketch(target, rank):
            return None
        return num_columns(self.dim(target), rank)

    def num_values(self, target: LinearMap, rank: int | None = None) -> int:
        if rank is not None and self.has_sketch(target, rank):
            return self.dim(target) * (rank + 1)
        return target.num_groups * self.dim(target) ** 2 // 2

    def num_summed(self, target: LinearMap, rank: int | None = None) -> int:
        num = self.num_columns(target, rank)
        if num is not None:
            return self.dim(target) * (num + 1)
        return self.num_values(target)
