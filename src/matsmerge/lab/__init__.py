"""The lab studies merges: training, evaluation, tuning, costs, experiments, reports."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matsmerge.lab.evaluation.comparison import evaluate
    from matsmerge.lab.reports.report_files import report
    from matsmerge.lab.training.training_run import train
    from matsmerge.lab.tuning.search import tune

_HOMES = {
    "evaluate": "matsmerge.lab.evaluation.comparison",
    "report": "matsmerge.lab.reports.report_files",
    "train": "matsmerge.lab.training.training_run",
    "tune": "matsmerge.lab.tuning.search",
}

__all__ = ["evaluate", "report", "train", "tune"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # Loaded on first use: they need libraries that not everybody has installed.
    if name not in _HOMES:
        raise AttributeError(f"module 'matsmerge.lab' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
