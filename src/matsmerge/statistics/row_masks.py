"""Which rows of a module's input are real, and which are padding.

A mask belongs to an input if its shape says so: a batch's masks are (sequences, length), and an
input of the same sequences and length has them. Encoder and decoder are told apart by their
lengths.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from matsmerge.errors import DataError


class RowMasks:
    """The masks of a batch."""

    def __init__(self, masks: Sequence[Tensor], num_sequences: int) -> None:
        self._num_sequences = num_sequences
        self._masks = [mask.bool() for mask in masks]
        self._padded = any(not bool(mask.all()) for mask in self._masks)
        self._found: dict[torch.Size, Tensor] = {}

    def real_rows(self, lead: torch.Size, module: str) -> Tensor | None:
        """Which rows are real, of those laid out as `lead` and counted flat; None for all."""
        is_one_each = lead[0] == self._num_sequences == lead.numel()
        if is_one_each or not self._padded:
            return None
        if lead not in self._found:
            self._found[lead] = self._find(lead, module).flatten().nonzero()[:, 0]
        return self._found[lead]

    def _find(self, lead: torch.Size, module: str) -> Tensor:
        laid_out = [_lay_out(mask, lead) for mask in self._masks]
        fitting = [mask for mask in laid_out if mask is not None]
        if not fitting:
            found = ", ".join(str(list(mask.shape)) for mask in self._masks)
            raise DataError(
                f"module '{module}': its input has rows laid out as {list(lead)}, which fits no "
                f"mask of the batch ({found}), so padding cannot be told from data; use batches "
                "of one example or of equal lengths"
            )
        if any(not torch.equal(fitting[0], other) for other in fitting[1:]):
            raise DataError(
                f"module '{module}': two masks of the batch have the shape "
                f"{list(fitting[0].shape)} (encoder and decoder inputs of equal length); pad one "
                "of them by one more column, so that they can be told apart"
            )
        return fitting[0]


def _lay_out(mask: Tensor, lead: Sequence[int]) -> Tensor | None:
    """A mask in the form of an input's rows; None if it does not fit."""
    if len(lead) == 1:
        return mask.flatten() if lead[0] == mask.numel() else None
    along = [i for i in range(1, len(lead)) if lead[i] == mask.shape[1]]
    if lead[0] != len(mask) or len(along) != 1:
        return None
    shape = [len(mask)] + [1] * (len(lead) - 1)
    shape[along[0]] = mask.shape[1]
    return mask.view(shape).expand(*lead)
