"""One task's examples on their way through the blocks of a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from matsmerge.statistics.held_tensors import Kept, Room, Shelf
from matsmerge.statistics.own_inputs import OwnInputs
from matsmerge.statistics.sequence_part import SequencePart
from matsmerge.statistics.statistics import Origin
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.task import Encoded, Task

Way = Literal["merged", "own"]  # through the merged blocks, or through those of the task's model


@dataclass
class TaskData:
    """One task's examples in batches, and what has been reached with them.

    Of each batch that is the output of the last block that is done, in the merged model and in the
    task's own, and within the block that is being merged the outputs of modules that are done. All
    that is kept for a batch can be had for some of its examples.
    """

    task: Task[Any]
    batches: Sequence[tuple[str, Sequence[Encoded]]]  # each with the set it goes to
    model: Origin
    data: Origin
    room: Room = field(default_factory=Room)

    def __post_init__(self) -> None:
        self._places = {
            example.number: (number, position)
            for number, (_, batch) in enumerate(self.batches)
            for position, example in enumerate(batch)
        }
        self._starts: dict[int, Sequence[int]] = {}
        self.begin()

    def begin(self, room: Room | None = None) -> None:
        """Go back to before the first block."""
        self.room = room or self.room
        # For each way and batch, by stack: the output of the stack's last block that is done.
        self._reached: dict[Way, list[dict[str, Any]]] = {
            "merged": [{} for _ in self.batches],
            "own": [{} for _ in self.batches],
        }
        self.end_section()

    def end_section(self) -> None:
        """Let go of what was kept for the section that was merged last."""
        self._shelf = Shelf(self.room)
        self._within: list[dict[str, Any]] = [{} for _ in self.batches]  # outputs, by module
        self.own_inputs = OwnInputs(self.room)

    @property
    def num_examples(self) -> int:
        return len(self._places)

    @property
    def num_held_bytes(self) -> int:
        """Of the outputs of blocks."""
        return sum(leaf.nbytes for leaf in tree_flatten(self._reached)[0] if isinstance(leaf, Kept))

    def first(self, num_examples: int) -> "TaskData":
        """Some examples of the first batch, as one batch."""
        to, batch = self.batches[0]
        return TaskData(self.task, [(to, batch[:num_examples])], self.model, self.data)

    def collated(self) -> Iterator[tuple[str, Batch]]:
        for number, (to, examples) in enumerate(self.batches):
            batch = self.task.collate(examples)
            self._starts[number] = batch.first_sequences
            yield to, batch

    def part_of(self, batch: Batch) -> SequencePart:
        """Which of the sequences a batch is, or some examples of one, each as often as it is."""
        places = [self._places[number] for number in batch.examples]
        number, positions = places[0][0], [position for _, position in places]
        starts = self._starts[number]
        if positions == list(range(len(starts) - 1)):
            return SequencePart(number, starts[-1])
        chosen = tuple(s for p in positions for s in range(starts[p], starts[p + 1]))
        return SequencePart(number, starts[-1], chosen)

    def hold(self, way: Way, batch: Batch, stack: str, output: Any) -> None:
        """Keep what a block gave for a whole batch."""
        self._reached[way][self.part_of(batch).batch][stack] = self._keep(output)

    def held_for(self, way: Way, batch: Batch, device: torch.device) -> dict[str, Any]:
        """What is held for a batch, or for some examples of one; copies, to be done with freely."""
        part = self.part_of(batch)
        held = self._reached[way][part.batch]
        return {stack: copied(output, part, device) for stack, output in held.items()}

    def hold_within(self, batch: Batch, module: str, output: Any) -> None:
        """Keep what a module of a block gave, if for a whole batch, in place of its parts'."""
        part = self.part_of(batch)
        if part.chosen is None:
            held = self._within[part.batch]
            for inner in [name for name in held if name.startswith(f"{module}.")]:
                del held[inner]
            held[module] = self._keep(output)

    def held_within(self, batch: Batch, module: str, device: torch.device) -> Any:
        """What is held of a module of the block, as copies; None if nothing is."""
        part = self.part_of(batch)
        output = self._within[part.batch].get(module)
        return None if output is None else copied(output, part, device)

    def _keep(self, output: Any) -> Any:
        return tree_map(lambda x: self._shelf.keep(x) if isinstance(x, Tensor) else x, output)


def copied(output: Any, part: SequencePart, device: torch.device) -> Any:
    """Values that are kept, or some sequences' part of them, to be done with freely."""

    def loaded(leaf: Any) -> Any:
        return part.share_of(leaf.load()).to(device, copy=True) if isinstance(leaf, Kept) else leaf

    return tree_map(loaded, output)
