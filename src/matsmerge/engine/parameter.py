"""One tensor of the output."""

from dataclasses import dataclass

import torch

from matsmerge.checkpoints.checkpoint import TensorSpec
from matsmerge.recipes.rules import Rule


@dataclass(frozen=True)
class Parameter:
    """One tensor of the output, and how it comes about."""

    name: str
    spec: TensorSpec
    compute_dtype: torch.dtype | None  # None: not a number to merge, copied as it is
    rule: Rule
