"""One layer of a LoRA that is written: its tensors from the factors of a weight's change."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from matsmerge.adapters.adapter import PREFIX
from matsmerge.checkpoints.checkpoint import TensorSpec


@dataclass(frozen=True)
class LoraLayer:
    """A module of a LoRA whose scaling is 1; `shape` is that of its weight as it is stored."""

    module: str
    shape: tuple[int, ...]
    rank: int
    dtype: torch.dtype
    is_transposed: bool = False
    is_embedding: bool = False

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The weight as a matrix, a convolution's filters as rows."""
        return self.shape[0], torch.Size(self.shape[1:]).numel()

    @property
    def names(self) -> tuple[str, str]:
        """Of A and B, as PEFT saves them."""
        if self.is_embedding:
            return tuple(f"{PREFIX}{self.module}.lora_embedding_{x}" for x in "AB")  # type: ignore[return-value]
        return tuple(f"{PREFIX}{self.module}.lora_{x}.weight" for x in "AB")  # type: ignore[return-value]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        rows, columns = self.matrix_shape
        inputs, outputs = (rows, columns) if self.is_transposed else (columns, rows)
        a: tuple[int, ...] = (self.rank, inputs)
        b: tuple[int, ...] = (outputs, self.rank)
        if len(self.shape) > 2:
            a, b = (self.rank, *self.shape[1:]), (outputs, self.rank, *(1 for _ in self.shape[2:]))
        return {name: TensorSpec(self.dtype, s) for name, s in zip(self.names, (a, b), strict=True)}

    def tensors(self, left: Tensor, right: Tensor) -> Mapping[str, Tensor]:
        """A and B for the change `left @ right` of the weight as it is stored."""
        a, b = (left.mT, right.mT) if self.is_transposed else (right, left)
        return {
            name: values.to(spec.dtype).reshape(spec.shape).contiguous()
            for (name, spec), values in zip(self.specs.items(), (a, b), strict=True)
        }
