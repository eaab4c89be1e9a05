"""A batch as the user gave it, and what must be known of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from matsmerge.errors import DataError
from matsmerge.statistics.gradients import Examples
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.prediction import IGNORED


@dataclass(frozen=True)
class ShownBatch:
    """A batch on the model's device, with its examples and masks."""

    item: Any
    examples: Examples
    masks: tuple[Tensor, ...]

    def take(self, chosen: Sequence[int]) -> "ShownBatch":
        """A batch of some of these examples, each as often as it is chosen."""
        starts = self.examples.starts
        sequences = [s for n in chosen for s in range(starts[n], starts[n + 1])]
        sizes = [starts[n + 1] - starts[n] for n in chosen]

        def part(leaf: Any) -> Any:
            is_whole = isinstance(leaf, Tensor) and leaf.ndim > 0
            return leaf[sequences] if is_whole and len(leaf) == starts[-1] else leaf

        is_batch = isinstance(self.item, Batch)
        return ShownBatch(
            self.item.take(chosen) if is_batch else tree_map(part, self.item),
            Examples([self.examples.numbers[n] for n in chosen], [0, *accumulate(sizes)]),
            tuple(mask[sequences] for mask in self.masks),
        )

    def few(self, num_examples: int) -> "ShownBatch":
        """Some of these examples; the first ones again if there are not so many.

        Padded examples come first, since models take other ways with and without padding.
        """
        order = self._padded_first()
        return self.take([order[n % len(order)] for n in range(num_examples)])

    @property
    def is_padded(self) -> tuple[bool, ...]:
        """Which of the masks mask anything."""
        return tuple(not bool(mask.all()) for mask in self.masks)

    def _padded_first(self) -> list[int]:
        example = self.examples.example_of_sequences(torch.device("cpu"))
        most = [int(example[int(mask.sum(1).argmin())]) for mask in self.masks]
        return list(dict.fromkeys([*most, *range(len(self.examples.numbers))]))


def show(item: Any, model: nn.Module, next_number: int) -> ShownBatch:
    """See what a batch is made of; examples without a number get the next ones."""
    device = next(
        (p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu")
    )
    if isinstance(item, Batch):
        batch = item.to(device)
        examples = Examples(batch.examples, batch.first_sequences)
        shown = ShownBatch(batch, examples, tuple(batch.row_masks))
    else:
        item = tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, item)
        num = count_examples(item)
        numbers = range(next_number, next_number + num)
        shown = ShownBatch(item, Examples(numbers, range(num + 1)), _masks(item, model))
    if not len(shown.examples.numbers):
        raise DataError("a batch is empty; leave it out")
    _check_masks(shown)
    return shown


def count_examples(item: Any) -> int:
    """The number of examples in a batch."""
    if isinstance(item, Batch):
        return len(item.examples)
    tensors = [t for t in tree_flatten(item)[0] if isinstance(t, Tensor) and t.ndim]
    if not tensors:
        raise DataError(
            f"a batch holds no tensors, found {type(item).__name__}; a batch is a tensor, or a "
            "tuple, list or mapping of tensors, with examples along their first dimension"
        )
    return len(tensors[0])


def _masks(item: Any, model: nn.Module) -> tuple[Tensor, ...]:
    """The masks of a batch for a transformers model."""
    if not isinstance(item, Mapping):
        return ()
    found = [item.get("attention_mask"), item.get("decoder_attention_mask")]
    labels = item.get("labels")
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    decoder = item.get("decoder_input_ids")
    if found[1] is None and isinstance(decoder, Tensor):
        found[1] = torch.ones_like(decoder)
    elif found[1] is None and isinstance(labels, Tensor) and is_encoder_decoder:
        found[1] = labels != IGNORED
    return tuple(m.bool() for m in found if isinstance(m, Tensor) and m.ndim == 2)


def _check_masks(shown: ShownBatch) -> None:
    problems = []
    for mask in shown.masks:
        if len(mask) != shown.examples.num_sequences:
            raise DataError(
                f"a mask has {len(mask)} rows in a batch of {shown.examples.num_sequences} "
                "sequences"
            )
        empty = (~mask.any(1)).nonzero()[:, 0]
        if len(empty):
            example = shown.examples.example_of_sequences(mask.device)
            problems += [
                f"example {shown.examples.numbers[n]}: all of it is masked as padding; "
                "leave it out of the data"
                for n in example[empty].unique().tolist()
            ]
    if problems:
        raise DataError(problems)
