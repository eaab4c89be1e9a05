"""Some sequences of a batch, and their share of what was kept for all of it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SequencePart:
    """Which sequences of which batch."""

    batch: int
    num_sequences: int  # of the whole batch
    chosen: tuple[int, ...] | None = None  # None: all, as they are

    def share_of(self, values: Tensor) -> Tensor:
        """Of something with an entry for each sequence; what has none is for all of them."""
        if self.chosen is None or not values.ndim or len(values) != self.num_sequences:
            return values
        return values[list(self.chosen)]

    def rows_of(self, values: Tensor) -> Tensor:
        """Of something with rows for each sequence, one sequence after the other."""
        if self.chosen is None:
            return values
        apart: Tensor = values.unflatten(0, (self.num_sequences, -1))
        return apart[list(self.chosen)].flatten(0, 1)
