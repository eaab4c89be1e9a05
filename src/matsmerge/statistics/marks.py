"""How well a classifier answered the examples that its statistics were collected from."""

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt
from torch import Tensor

from matsmerge.tasks.prediction import Prediction

# Standard errors by which a model that learnt something is better than always the same answer.
CLEARLY_BETTER = 2.0
ENOUGH_EXAMPLES = 50  # with fewer, a good model could not be told from that one


class Marks(BaseModel):
    """Counts of examples with a label, which is one of a few classes; the same in any order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num: NonNegativeInt = 0
    num_right: NonNegativeInt = 0
    labels: dict[str, NonNegativeInt] = {}  # how often each came up

    def __add__(self, other: "Marks") -> "Marks":
        names = sorted({*self.labels, *other.labels}, key=int)
        return Marks(
            num=self.num + other.num,
            num_right=self.num_right + other.num_right,
            labels={n: self.labels.get(n, 0) + other.labels.get(n, 0) for n in names},
        )

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num

    @property
    def majority(self) -> float:
        """The share of the commonest label."""
        return max(self.labels.values()) / self.num

    @property
    def is_poor(self) -> bool:
        is_known = self.num >= ENOUGH_EXAMPLES
        return is_known and not is_clearly_better(self.accuracy, self.majority, self.num)


def is_clearly_better(accuracy: float, majority: float, num_examples: int) -> bool:
    """Is a model right more often than one that always gives the commonest answer?"""
    error = math.sqrt(majority * (1 - majority) / num_examples)
    return accuracy >= majority + CLEARLY_BETTER * error


def marks_of(result: Any) -> Marks:
    """The marks of what a model said of a batch; of sequences and without labels there are none."""
    if not isinstance(result, Prediction) or result.logits.ndim != 2 or result.targets is None:
        return Marks()
    targets: Tensor = result.targets.detach().cpu()
    if targets.ndim != 1 or targets.is_floating_point() or bool((targets < 0).any()):
        return Marks()  # no classes; whether a loss can be made of them is seen there
    right = result.logits.detach().argmax(1).cpu() == targets
    counts = targets.bincount().tolist()
    return Marks(
        num=len(targets),
        num_right=int(right.sum()),
        labels={str(label): num for label, num in enumerate(counts) if num},
    )
