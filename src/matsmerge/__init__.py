"""Merge fine-tuned models by matching them in their task parameter subspaces."""

import importlib
from typing import TYPE_CHECKING, Any

from matsmerge.version import __version__

if TYPE_CHECKING:
    from matsmerge import methods
    from matsmerge.advice.advice import Advice, Finding
    from matsmerge.api import advise, extract_lora, merge, plan
    from matsmerge.checkpoints.checkpoint import Checkpoint
    from matsmerge.checkpoints.source import open_checkpoint
    from matsmerge.engine.executor import Executor, SerialExecutor
    from matsmerge.engine.hub_push import push
    from matsmerge.engine.local_executor import LocalExecutor
    from matsmerge.engine.merged import Merged
    from matsmerge.engine.planned_merge import PlannedMerge
    from matsmerge.engine.ray_executor import RayExecutor
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
    from matsmerge.recipes.recipe import Recipe
    from matsmerge.recipes.recipe_file import read_recipe
    from matsmerge.statistics.collection_run import collect
    from matsmerge.statistics.statistics import Statistics
    from matsmerge.statistics.statistics_callback import StatisticsCallback
    from matsmerge.statistics.statistics_file import open_statistics
    from matsmerge.tasks.ready_model import export, load

_HOMES = {
    "Advice": "matsmerge.advice.advice",
    "Checkpoint": "matsmerge.checkpoints.checkpoint",
    "Executor": "matsmerge.engine.executor",
    "Finding": "matsmerge.advice.advice",
    "LocalExecutor": "matsmerge.engine.local_executor",
    "Merged": "matsmerge.engine.merged",
    "PlannedMerge": "matsmerge.engine.planned_merge",
    "RayExecutor": "matsmerge.engine.ray_executor",
    "Recipe": "matsmerge.recipes.recipe",
    "SerialExecutor": "matsmerge.engine.executor",
    "Statistics": "matsmerge.statistics.statistics",
    "StatisticsCallback": "matsmerge.statistics.statistics_callback",
    "advise": "matsmerge.api",
    "collect": "matsmerge.statistics.collection_run",
    "export": "matsmerge.tasks.ready_model",
    "extract_lora": "matsmerge.api",
    "load": "matsmerge.tasks.ready_model",
    "merge": "matsmerge.api",
    "open_checkpoint": "matsmerge.checkpoints.source",
    "open_statistics": "matsmerge.statistics.statistics_file",
    "plan": "matsmerge.api",
    "push": "matsmerge.engine.hub_push",
    "read_recipe": "matsmerge.recipes.recipe_file",
}
_LAB = ("evaluate", "report", "train", "tune")

__all__ = [
    "Advice",
    "AlignmentError",
    "Checkpoint",
    "CheckpointError",
    "DataError",
    "Executor",
    "Finding",
    "LocalExecutor",
    "MatsError",
    "Merged",
    "NonFiniteError",
    "OutputError",
    "PlannedMerge",
    "RayExecutor",
    "Recipe",
    "RecipeError",
    "ResourceError",
    "SerialExecutor",
    "Statistics",
    "StatisticsCallback",
    "StatisticsError",
    "__version__",
    "advise",
    "collect",
    "export",
    "extract_lora",
    "load",
    "merge",
    "methods",
    "open_checkpoint",
    "open_statistics",
    "plan",
    "push",
    "read_recipe",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `mats --help` need not wait for torch.
    if name not in __all__:
        place = "; it is in matsmerge.lab" if name in _LAB else ""
        raise AttributeError(f"module 'matsmerge' has no attribute '{name}'{place}")
    if name == "methods":
        return importlib.import_module("matsmerge.methods")
    return getattr(importlib.import_module(_HOMES.get(name, "matsmerge.errors")), name)
