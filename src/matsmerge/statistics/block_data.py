"""A task's examples on their way through a model's blocks and, for gradients, back again."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from matsmerge.statistics.gradients import Examples
from matsmerge.statistics.held_tensors import Kept
from matsmerge.statistics.structure import is_float, spread_output
from matsmerge.statistics.task_data import TaskData, Way, copied
from matsmerge.tasks.batch import Batch

BatchPlace = tuple[
    int, int
]  # which of the scalars that are sent back, and which tensor of an output


@dataclass
class Capture:
    """The gradients that arrive at outputs while the scalars of one pass are sent back.

    What all sequences share gets a part for each of them, so that each has a gradient of its own.
    """

    gradients: dict[str, dict[BatchPlace, Tensor]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    num_terms: int = 0
    _term: int = 0  # the one that is sent back now

    def watch(self, key: str, output: Any, num_sequences: int) -> Any:
        """An output for others to use, at which gradients are caught."""
        leaves = iter(range(len(tree_flatten(output)[0])))

        def watched(leaf: Any) -> Any:
            number = next(leaves)
            if not is_float(leaf):
                return leaf
            leaf = spread_output(leaf, num_sequences)
            # A copy, which the model's code may change in place.
            leaf = (leaf if leaf.requires_grad else leaf.detach().requires_grad_()).clone()
            leaf.register_hook(lambda grad: self._arrive(key, number, grad))
            return leaf

        return tree_map(watched, output)

    def _arrive(self, key: str, number: int, grad: Tensor) -> None:
        # A copy: autograd adds those of later scalars to this one.
        self.gradients[key][self._term, number] = grad.detach().clone()

    def marked(self, terms: Iterable[Tensor]) -> Iterator[Tensor]:
        """The same scalars; when one is sent back it says so."""
        for number, term in enumerate(terms):
            self.num_terms = number + 1
            if term.requires_grad:
                term.register_hook(lambda _, number=number: setattr(self, "_term", number))
            yield term


class BlockData(TaskData):
    """Of each batch, outputs of blocks, and gradients at outputs."""

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        self._outputs: list[dict[str, Any]] = [{} for _ in self.batches]  # by block
        self._gradients: list[dict[str, dict[BatchPlace, Kept]]] = [{} for _ in self.batches]
        self._num_terms = [0 for _ in self.batches]
        self.shown: dict[str, str] = {}  # of each stack, the block whose output is given back
        self.capture: Capture | None = None

    def hold_block(self, batch: Batch, block: str, output: Any) -> None:
        self._outputs[self.part_of(batch).batch][block] = self._keep(output)

    def release(self, block: str) -> None:
        """Let go of what a block gave."""
        for held in self._outputs:
            held.pop(block, None)

    def release_gradients(self, block: str) -> None:
        for held in self._gradients:
            held.pop(block, None)

    def held_for(self, _: Way, batch: Batch, device: torch.device) -> dict[str, Any]:
        part = self.part_of(batch)
        held = {}
        for stack, block in self.shown.items():
            held[stack] = copied(self._outputs[part.batch][block], part, device)
            if self.capture is not None and torch.is_grad_enabled():
                held[stack] = self.capture.watch(block, held[stack], batch.first_sequences[-1])
        return held

    def add_gradients(self, batch: Batch, capture: Capture) -> None:
        """Add what arrived to what has arrived in passes through later blocks."""
        number = self.part_of(batch).batch
        self._num_terms[number] = max(self._num_terms[number], capture.num_terms)
        for key, found in capture.gradients.items():
            own = self._gradients[number].setdefault(key, {})
            for place, grad in found.items():
                earlier = own.get(place)
                total = grad if earlier is None else grad + earlier.load().to(grad.device)
                own[place] = self._shelf.keep(total)

    def terms(self, batch: Batch, outputs: Iterable[tuple[str, Any]]) -> Iterator[Tensor]:
        """Scalars of examples whose gradients at outputs are those that were added there."""
        part = self.part_of(batch)
        examples = Examples(batch.examples, batch.first_sequences)
        flat = [(key, n, y) for key, out in outputs for n, y in enumerate(tree_flatten(out)[0])]
        for term in range(self._num_terms[part.batch]):
            total: Tensor | None = None
            for key, n, y in flat:
                kept = self._gradients[part.batch].get(key, {}).get((term, n))
                if kept is None:
                    continue
                wide = torch.promote_types(y.dtype, torch.float32)
                product = y.to(wide) * part.share_of(kept.load()).to(y.device, wide)
                if len(product) == examples.num_sequences:
                    own = examples.of_sequences(product.reshape(len(product), -1).sum(1))
                else:  # all sequences share it, and only the sum is looked at
                    own = product.sum() * (torch.arange(len(batch.examples)) == 0).to(y.device)
                total = own if total is None else total + own
            yield torch.zeros(len(batch.examples)) if total is None else total
