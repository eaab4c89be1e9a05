"""In which order examples are shown."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.utils.data import Sampler

_BATCHES_SORTED = 50  # batches' worth of examples among which those of similar length are sought


@dataclass(eq=False)
class ExampleOrder(Sampler[int]):
    """A random order that depends on the seed and the epoch alone.

    `lengths` puts examples of similar length into one batch. With `groups` (a number for each
    example) every group has as many examples in an epoch: some of a large one, all of a small
    one several times over.
    """

    num_examples: int
    seed: int
    batch_size: int = 1
    lengths: Sequence[int] | None = None
    groups: Sequence[int] | None = None
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_examples

    def __iter__(self) -> Iterator[int]:
        drawn = random.Random(f"{self.seed} {self.epoch}")
        order = list(range(self.num_examples)) if self.groups is None else self._shares(drawn)
        drawn.shuffle(order)
        return iter(order if self.lengths is None else self._by_length(order, drawn))

    def _shares(self, drawn: random.Random) -> list[int]:
        """Indices with an equal share for each group; the first groups get what is left over."""
        assert self.groups is not None
        members_of: dict[int, list[int]] = {}
        for index, group in enumerate(self.groups):
            members_of.setdefault(group, []).append(index)
        order: list[int] = []
        for i, members in enumerate(members_of.values()):
            size, rest = divmod(self.num_examples, len(members_of))
            size += i < rest
            times, more = divmod(size, len(members))
            order += members * times + drawn.sample(members, more)
        return order

    def _by_length(self, order: list[int], drawn: random.Random) -> list[int]:
        assert self.lengths is not None
        lengths, size = self.lengths, self.batch_size
        batches = []
        for start in range(0, len(order), size * _BATCHES_SORTED):
            some = order[start : start + size * _BATCHES_SORTED]
            some.sort(key=lambda index: -lengths[index])
            batches += [some[i : i + size] for i in range(0, len(some), size)]
        # Batches are cut from the order by their number, so that a smaller one has to be last.
        whole = [batch for batch in batches if len(batch) == size]
        drawn.shuffle(whole)
        return [i for batch in (*whole, *(b for b in batches if len(b) < size)) for i in batch]
