"""Sums of second moments, which several statistics are made of."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from matsmerge.linalg.triangle import ENOUGH_ROWS, UpperSketch, UpperSum, pack_upper, unpack_upper
from matsmerge.statistics.kinds.statistic import Form, Shapes, Storage, Sum, check_parts


class MomentSum(Sum):
    """Sums over rows z of zzᵀ and, if wanted, of z."""

    def __init__(self, total: UpperSum, num_rows: int = 0) -> None:
        self._sum = total  # (d, d) or (groups, d, d)
        self.num_rows = num_rows

    @classmethod
    def new(cls, num_groups: int, dim: int, storage: Storage) -> "MomentSum":
        shape = (num_groups, dim) if num_groups > 1 else (dim,)
        first = torch.zeros(*shape, dtype=storage.dtype, device=storage.device)
        if storage.is_sketch:
            return cls(UpperSketch(first))
        sums = torch.zeros(*shape, dim, dtype=storage.dtype, device=storage.device)
        return cls(UpperSum(sums, first if storage.keeps_mean else None))

    @classmethod
    def of_parts(
        cls,
        num_groups: int,
        dim: int,
        parts: Mapping[str, Tensor],
        num_rows: int,
        dtype: torch.dtype,
    ) -> "MomentSum":
        check_parts(parts, _part_shapes(num_groups, dim, parts), dtype)
        return cls(UpperSum.of_parts(parts), num_rows)

    @classmethod
    def of_sums(cls, sums: Sequence[tuple[Tensor, Form]], num_rows: int) -> "MomentSum":
        (packed, _), *first = sums
        return cls(UpperSum(unpack_upper(packed), first[0][0] if first else None), num_rows)

    def add(self, rows: Tensor, keep: Tensor | None = None) -> None:  # (rows, d), (groups, rows, d)
        self._sum.add(rows, keep)
        self.num_rows += rows.shape[-2] if keep is None else len(keep)

    def add_sum(self, other: "MomentSum") -> None:
        first, others = self._sum.first, other._sum.first
        joined = None if first is None or others is None else first + others
        self._sum = UpperSum(self._sum.upper + other._sum.upper, joined)
        self.num_rows += other.num_rows

    def parts(self) -> dict[str, Tensor]:
        return self._sum.parts()

    def sums(self) -> list[tuple[Tensor, Form]]:
        found: list[tuple[Tensor, Form]] = [(pack_upper(self._sum.upper), "symmetric")]
        return found if self._sum.first is None else [*found, (self._sum.first, "full")]

    def comparable(self) -> Tensor:
        return self._sum.comparable()

    def clone(self) -> "MomentSum":
        return MomentSum(self._sum.clone(), self.num_rows)


def _part_shapes(num_groups: int, dim: int, parts: Mapping[str, Tensor]) -> Shapes:
    groups = (num_groups,) if num_groups > 1 else ()
    shapes: dict[str, tuple[int, ...]] = {"upper": (*groups, dim * (dim + 1) // 2)}
    if "first" in parts:
        shapes["first"] = (*groups, dim)
    if "rows" in parts:
        num_rows = parts["rows"].shape[0] if parts["rows"].ndim else 0
        shapes["rows"] = (min(num_rows, dim, ENOUGH_ROWS), dim)
    return shapes
