"""Merge fine-tuned models by matching them in their task parameter subspaces."""

import importlib
from typing import TYPE_CHECKING, Any

from matsmerge.version import __version__

if TYPE_CHECKING:
    from matsmerge.api import merge
    from matsmerge.checkpoints.opening import open_checkpoint
    from matsmerge.errors import (
        AlignmentError,
        CheckpointError,
        MatsError,
        NonFiniteError,
        OutputError,
        RecipeError,
        ResourceError,
    )

__all__ = [
    "AlignmentError",
    "CheckpointError",
    "MatsError",
    "NonFiniteError",
    "OutputError",
    "RecipeError",
    "ResourceError",
    "__version__",
    "merge",
    "open_checkpoint",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `mats --help` need not wait for torch.
    if name == "merge":
        return importlib.import_module("matsmerge.api").merge
    if name == "open_checkpoint":
        return importlib.import_module("matsmerge.checkpoints.opening").open_checkpoint
    if name in __all__:
        return getattr(importlib.import_module("matsmerge.errors"), name)
    raise AttributeError(f"module 'matsmerge' has no attribute '{name}'")
