"""A batch as the user gave it, and what must be known of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from matsmerge.errors import DataError
from matsmerge.statistics.gradients import Examples
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.prediction import IGNORED


@dataclass(frozen=True)
class ShownBatch(Batch):
    """A batch on the model's device; of one in another form, the inputs are its leaves."""

    form: TreeSpec | None = None  # None: it was a `Batch`

    @property
    def item(self) -> Any:
        """The batch in the form in which it was given."""
        return self if self.form is None else tree_unflatten(list(self.inputs.values()), self.form)

    @cached_property
    def sequences(self) -> Examples:
        """Which sequences belong to which example."""
        return Examples(self.examples, self.first_sequences)

    @property
    def is_padded(self) -> tuple[bool, ...]:
        """Which of the masks mask anything."""
        return tuple(not bool(mask.all()) for mask in self.row_masks)

    def few(self, num_examples: int) -> "ShownBatch":
        """Some of these examples; the first ones again if there are not so many.

        Padded examples come first, since models take other ways with and without padding.
        """
        example = self.sequences.example_of_sequences(torch.device("cpu"))
        most = [int(example[int(mask.sum(1).argmin())]) for mask in self.row_masks]
        order = list(dict.fromkeys([*most, *range(len(self.examples))]))
        return self.take([order[n % len(order)] for n in range(num_examples)])


def plain_batch(item: Any) -> Any:
    """A mapping as a dict: torch sees no tensors in what tokenizers return."""
    return dict(item) if isinstance(item, Mapping) else item


def show(item: Any, model: nn.Module, next_number: int) -> ShownBatch:
    """See what a batch is made of; examples without a number get the next ones."""
    item = plain_batch(item)
    device = next(
        (p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu")
    )
    if isinstance(item, Batch):
        shown = ShownBatch(**vars(item.to(device)))
    else:
        item = tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, item)
        leaves, form = tree_flatten(item)
        inputs = {str(i): leaf for i, leaf in enumerate(leaves)}
        numbers = range(next_number, next_number + count_examples(item))
        shown = ShownBatch(inputs, numbers, row_masks=_masks(item, model), form=form)
    if not len(shown.examples):
        raise DataError("a batch is empty; leave it out")
    _check_masks(shown)
    return shown


def count_examples(item: Any) -> int:
    """The number of examples in a batch."""
    if isinstance(item, Batch):
        return len(item.examples)
    tensors = [t for t in tree_flatten(plain_batch(item))[0] if isinstance(t, Tensor) and t.ndim]
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
    for mask in shown.row_masks:
        if len(mask) != shown.sequences.num_sequences:
            raise DataError(
                f"a mask has {len(mask)} rows in a batch of {shown.sequences.num_sequences} "
                "sequences"
            )
        empty = (~mask.any(1)).nonzero()[:, 0]
        example = shown.sequences.example_of_sequences(mask.device)
        problems += [
            f"example {shown.examples[n]}: all of it is masked as padding; leave it out of the data"
            for n in example[empty].unique().tolist()
        ]
    DataError.raise_all(problems)
