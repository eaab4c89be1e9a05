"""Cross moments: the second moment of [z; δ], (2 in, 2 in), z* = z + δ.

z is a row that a linear map receives in the merged model so far, z* what it receives for the same
example in a model of its own. Beside it is the mean of both, if the map has a bias. Merging along
the merged model collects these; they depend on the merge, and no file of one model's has them.
"""

from typing import ClassVar

from matsmerge.statistics.kinds.gram_matrix import GRAM
from matsmerge.statistics.kinds.moment_sum import MomentStatistic
from matsmerge.statistics.kinds.statistic import Arrays, InputStatistic
from matsmerge.statistics.linear_maps import LinearMap


class PairedMoments(MomentStatistic, InputStatistic):
    """Second moment of what a map receives, and of how far that is from a model's own."""

    name = "pairs"
    arrays: ClassVar[Arrays] = {"pairs": ("symmetric",), "pairs_mean": ("full",)}
    includes = (GRAM,)
    is_per_row = True
    is_paired = True
    expected_reasons = ("looks up rows",)

    def dim(self, target: LinearMap) -> int:
        return 2 * target.num_inputs

    def refuses(self, target: LinearMap) -> str | None:
        return "looks up rows" if target.layout == "embedding" else None


PAIRS = PairedMoments()
