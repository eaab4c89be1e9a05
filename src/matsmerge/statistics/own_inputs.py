"""What linear maps receive in a model of its own, beside what they receive in the merged one."""

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class OwnInputs:
    """Inputs of one pass with a model's own weights, taken again in the order they came."""

    def __init__(self) -> None:
        self.is_recording = False
        self._noted: dict[str, deque[Tensor]] = defaultdict(deque)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what maps receive until the context ends; what was noted before is let go."""
        self._noted.clear()
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False

    def note(self, name: str, x: Tensor) -> None:
        self._noted[name].append(x.detach())

    def take(self, name: str) -> Tensor:
        """The next input that a map received."""
        return self._noted[name].popleft()
