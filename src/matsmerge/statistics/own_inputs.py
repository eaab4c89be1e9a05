"""What linear maps receive in a model of its own, beside what they receive in the merged one."""

from collections.abc import Iterable

from torch import Tensor

from matsmerge.statistics.held_tensors import Kept, Room, Shelf
from matsmerge.statistics.sequence_part import SequencePart
from matsmerge.statistics.structure import place_of


class OwnInputs:
    """Inputs of a section's maps from one pass over a task's data with its model's own weights.

    They are noted batch by batch, and taken again for a batch or some of its sequences, in the
    order in which a map was called. Maps that received the very same tensor share it.
    """

    def __init__(self, room: Room) -> None:
        self._shelf = Shelf(room)
        self._noted: dict[tuple[int, str], list[Kept]] = {}  # by batch and map
        self._last: tuple[Tensor, int, Kept] | None = None
        self._part: SequencePart | None = None
        self._num_taken: dict[str, int] = {}

    def note(self, batch: int, name: str, x: Tensor) -> None:
        """Keep what a map received."""
        last = self._last
        is_same = last is not None and last[1] == x._version and place_of(last[0]) == place_of(x)
        kept = last[2] if last is not None and is_same else self._shelf.keep(x)
        # Held, so that its memory is not given to another tensor before that is compared.
        self._last = x, x._version, kept
        self._noted.setdefault((batch, name), []).append(kept)

    def end_batch(self) -> None:
        self._last = None

    def show(self, part: SequencePart) -> None:
        """What is taken from now on: the inputs of these sequences, from the first call on."""
        self._part = part
        self._num_taken.clear()

    def take(self, name: str) -> Tensor:
        """The next input that a map received."""
        assert self._part is not None
        at = self._num_taken.get(name, 0)
        self._num_taken[name] = at + 1
        return self._part.rows_of(self._noted[self._part.batch, name][at].load())

    def forget(self, names: Iterable[str]) -> None:
        """Let go of what maps received that are merged now."""
        gone = set(names)
        self._noted = {key: kept for key, kept in self._noted.items() if key[1] not in gone}
