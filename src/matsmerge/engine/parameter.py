"""One parameter of a merge."""

from dataclasses import dataclass

import torch

from matsmerge.adapters.lora import LoraLayer
from matsmerge.checkpoints.checkpoint import TensorSpec
from matsmerge.recipes.rules import Rule


@dataclass(frozen=True)
class Parameter:
    """One parameter that is merged, how, and what is written of it.

    That is the tensor itself, perhaps under another name, or the factors of its change.
    """

    name: str
    spec: TensorSpec
    compute_dtype: torch.dtype | None  # None: not a number to merge, copied as it is
    rule: Rule
    written_as: str | None = None
    lora: LoraLayer | None = None

    @property
    def is_merged(self) -> bool:
        """Whether it holds numbers that are merged, and not copied."""
        return self.compute_dtype is not None and self.spec.num_elements > 0

    @property
    def written(self) -> dict[str, TensorSpec]:
        """The tensors to write."""
        return self.lora.specs if self.lora else {self.written_as or self.name: self.spec}
