"""Statistics of a model in a folder, on data in a file: what `mats collect` does, from Python."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from matsmerge.errors import RecipeError
from matsmerge.statistics.collection import Loss
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.prepared_collection import (
    ExampleChoice,
    PreparedCollection,
    prepare_collection,
)
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task_file import TaskFile, read_task_file


def prepare_folder(
    model: nn.Module | str | Path,
    data: str | Path,
    options: CollectionOptions,
    loss: Loss | None,
    choice: Mapping[str, Any],
) -> PreparedCollection:
    """Read data or a task file, load the model and encode; `choice` is which examples, and how."""
    if isinstance(model, nn.Module):
        raise RecipeError(
            f"{data}: data in a file needs the model's folder, with its tokenizer; give that, or "
            "batches"
        )
    if loss is not None:
        raise RecipeError(f"{data}: the task says what the loss is; leave out loss=")
    is_task = Path(data).suffix in (".yaml", ".yml")
    described = read_task_file(data) if is_task else TaskFile(data=str(data))
    given = dict(choice)
    rows = read_split(described, given.pop("split", None))
    loaded = load_model(
        model, described, need_targets=options.wants_targets, device=given.pop("device", None)
    )
    chosen = ExampleChoice(columns=described.columns, wordings=described.wordings, **given)
    return prepare_collection(loaded, rows, options, chosen)
