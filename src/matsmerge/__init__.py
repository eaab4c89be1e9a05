"""Merge fine-tuned models by matching them in their task parameter subspaces."""

import importlib
from typing import TYPE_CHECKING, Any

from matsmerge.version import __version__

if TYPE_CHECKING:
    from matsmerge.api import merge, merge_trajectory
    from matsmerge.checkpoints.opening import open_checkpoint
    from matsmerge.errors import (
        AlignmentError,
        CheckpointError,
        DataError,
        MatsError,
        NonFiniteError,
        OutputError,
        RecipeError,
        ResourceError,
        StatisticsError,
    )
    from matsmerge.evaluation.comparing import evaluate
    from matsmerge.statistics.collecting import collect
    from matsmerge.statistics.statistics_file import open_statistics
    from matsmerge.training.training import train

__all__ = [
    "AlignmentError",
    "CheckpointError",
    "DataError",
    "MatsError",
    "NonFiniteError",
    "OutputError",
    "RecipeError",
    "ResourceError",
    "StatisticsError",
    "__version__",
    "collect",
    "evaluate",
    "merge",
    "merge_trajectory",
    "open_checkpoint",
    "open_statistics",
    "train",
]


_HOMES = {
    "collect": "matsmerge.statistics.collecting",
    "evaluate": "matsmerge.evaluation.comparing",
    "merge": "matsmerge.api",
    "merge_trajectory": "matsmerge.api",
    "open_checkpoint": "matsmerge.checkpoints.opening",
    "open_statistics": "matsmerge.statistics.statistics_file",
    "train": "matsmerge.training.training",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `mats --help` need not wait for torch.
    if name not in __all__:
        raise AttributeError(f"module 'matsmerge' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES.get(name, "matsmerge.errors")), name)
