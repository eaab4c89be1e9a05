"""The diagonal of the Fisher information: F = 1/N sum over examples of g * g.

g is the gradient of one example's loss, N the number of examples.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from matsmerge.statistics.gradients import MapCall, add_squares
from matsmerge.statistics.kinds.statistic import Arrays, GradientStatistic
from matsmerge.statistics.kinds.tensor_sum import TensorStatistic, TensorSum
from matsmerge.statistics.parameters import Owned


class SquareSum(TensorSum):
    """The sum of squared gradients."""

    def add(self, rows: Tensor, keep: Tensor | None = None) -> None:
        assert keep is None
        self.total = self.total.to(rows.device)
        if rows.ndim == 2:  # a vector's
            self.total += rows.square().sum(0).view_as(self.total)
        else:
            self.total.addcmul_(rows[0], rows[0])

    def add_calls(self, calls: Sequence[MapCall]) -> None:
        """Without an example's whole gradient, of which a tile at a time is enough."""
        self.total = self.total.to(calls[0].x.device)
        add_squares(self.total, calls)


class FisherDiagonal(TensorStatistic[Owned], GradientStatistic):
    """Mean over examples of the squared gradient, in the parameter's shape."""

    name = "fisher"
    arrays: ClassVar[Arrays] = {"fisher": ("full",)}
    is_diagonal = True
    sum_type = SquareSum

    def shape(self, target: Owned) -> tuple[int, ...]:
        return tuple(target.parameter.shape)


FISHER = FisherDiagonal()
