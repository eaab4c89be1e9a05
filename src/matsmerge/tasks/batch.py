"""What a model is shown at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Examples for one forward pass.

    An example is usually one sequence (or image); example n of a multiple-choice task is the
    sequences `starts[n]` to `starts[n + 1]`, one per choice.
    """

    inputs: Mapping[str, Any]  # keyword arguments of the model
    examples: Sequence[int]  # the number of each example in its data, from 0
    targets: Tensor | None = None  # as in `Prediction`
    row_masks: Sequence[Tensor] = field(default=())  # (sequences, length) each, True where real
    starts: Sequence[int] | None = None  # None: one sequence per example
    tokens: Tensor | None = None  # (sequences, length), where each sequence has targets of its own

    @property
    def first_sequences(self) -> Sequence[int]:
        """Where the sequences of each example begin, and where the last one's end."""
        return range(len(self.examples) + 1) if self.starts is None else self.starts

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch with its tensors on a device."""

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        return replace(
            self,
            inputs={name: moved(value) for name, value in self.inputs.items()},
            targets=moved(self.targets),
            row_masks=[moved(mask) for mask in self.row_masks],
            tokens=moved(self.tokens),
        )

    def take(self, chosen: Sequence[int]) -> Self:
        """The batch of some of its examples, each as often as it is chosen."""
        starts = self.first_sequences
        sequences = [s for n in chosen for s in range(starts[n], starts[n + 1])]

        def taken(value: Any) -> Any:
            is_whole = isinstance(value, Tensor) and value.ndim > 0 and len(value) == starts[-1]
            return value[sequences] if is_whole else value

        sizes = [starts[n + 1] - starts[n] for n in chosen]
        return replace(
            self,
            inputs={name: taken(value) for name, value in self.inputs.items()},
            examples=[self.examples[n] for n in chosen],
            targets=None if self.targets is None else self.targets[list(chosen)],
            row_masks=[taken(mask) for mask in self.row_masks],
            starts=None if self.starts is None else [0, *accumulate(sizes)],
            tokens=taken(self.tokens),
        )
