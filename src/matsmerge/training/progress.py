"""What a run tells while it goes on."""

from typing import Protocol


class Progress(Protocol):
    """Told of batches and checkpoints."""

    def begin(self, num_steps: int, first: int) -> None:
        """There are so many batches at most; the first ones are done already."""

    def step(self, number: int, loss: float) -> None:
        """A batch is done."""

    def checkpoint(self, number: int, score: float | None, is_best: bool) -> None:
        """A checkpoint was scored and kept."""


class Silent:
    """Tells nobody."""

    def begin(self, num_steps: int, first: int) -> None:
        pass

    def step(self, number: int, loss: float) -> None:
        pass

    def checkpoint(self, number: int, score: float | None, is_best: bool) -> None:
        pass
