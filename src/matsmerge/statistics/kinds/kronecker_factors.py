"""K-FAC: Gram matrices, and O = 1/N sum over rows of o oᵀ, (out, out).

o is the loss's gradient at a row of a linear map's output, N the number of examples. With these
scales the Fisher information of a weight (out, in) is about `O ⊗ G`: each row of an example counts,
and rows are taken to be independent.
"""

from typing import ClassVar

from matsmerge.statistics.kinds.gram_matrix import GRAM
from matsmerge.statistics.kinds.moment_sum import MomentStatistic
from matsmerge.statistics.kinds.statistic import Arrays, OutputStatistic
from matsmerge.statistics.linear_maps import LinearMap

_MAX_OUTPUTS = 1 << 14  # the second moment of a vocabulary's gradients would not fit


class KroneckerFactors(MomentStatistic, OutputStatistic):
    """Gram matrices, and the second moment of output gradients, summed over an example's rows."""

    name = "kfac"
    arrays: ClassVar[Arrays] = {"outputs": ("symmetric", "sketch", "wide")}
    title = "second moments of output gradients (kfac)"
    includes = (GRAM,)

    def dim(self, target: LinearMap) -> int:
        return target.num_outputs

    def refuses(self, target: LinearMap) -> str | None:
        return f"more than {_MAX_OUTPUTS} outputs" if target.num_outputs > _MAX_OUTPUTS else None


KFAC = KroneckerFactors()
