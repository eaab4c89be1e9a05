"""K-FAC: Gram matrices, and O = 1/N sum over rows of o oᵀ, (out, out).

o is the loss's gradient at a row of a linear map's output, N the number of examples. With these
scales the Fisher information of a weight (out, in) is about `O ⊗ G`: each row of an example counts,
and rows are taken to be independent.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from matsmerge.statistics.kinds.gram_matrix import GRAM
from matsmerge.statistics.kinds.moment_sum import MomentSum
from matsmerge.statistics.kinds.statistic import Arrays, Form, OutputStatistic, Storage
from matsmerge.statistics.linear_maps import LinearMap

_MAX_OUTPUTS = 1 << 14  # the second moment of a vocabulary's gradients would not fit


class KroneckerFactors(OutputStatistic):
    """Gram matrices, and the second moment of output gradients, summed over an example's rows."""

    name = "kfac"
    arrays: ClassVar[Arrays] = {"outputs": ("symmetric",)}
    title = "second moments of output gradients (kfac)"
    includes = (GRAM,)

    def new(self, target: LinearMap, storage: Storage) -> MomentSum:
        return MomentSum.new(target.num_groups, target.num_outputs, storage)

    def of_parts(
        self, target: LinearMap, parts: Mapping[str, Tensor], num_rows: int, dtype: torch.dtype
    ) -> MomentSum:
        return MomentSum.of_parts(target.num_groups, target.num_outputs, parts, num_rows, dtype)

    def of_sums(self, sums: Sequence[tuple[Tensor, Form]], num_rows: int) -> MomentSum:
        return MomentSum.of_sums(sums, num_rows)

    def num_values(self, target: LinearMap) -> int:
        return target.num_groups * target.num_outputs**2 // 2

    def refuses(self, target: LinearMap) -> str | None:
        return f"more than {_MAX_OUTPUTS} outputs" if target.num_outputs > _MAX_OUTPUTS else None


KFAC = KroneckerFactors()
