"""A model's own data in a recipe, for methods that run models on data while they merge."""

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from pydantic import Field, model_serializer

from matsmerge.limits import MOST_AT_ONCE, MOST_COUNTED, NUM_SEEDS
from matsmerge.statistics.collection_options import CollectionOptions, make_collection_options
from matsmerge.statistics.prepared_collection import ExampleChoice
from matsmerge.tasks.task_file import TaskFile, read_task_file


class ModelData(TaskFile):
    """Where the data is, which examples to use and how to show them; as `mats collect` has it.

    The path may be that of a task file (.yaml), which says the rest; what is given here counts.
    """

    data: str = Field(validation_alias="path", description="data, or a task file (.yaml)")
    num_examples: int = Field(
        1000, ge=0, le=MOST_COUNTED, description="the first so many examples; 0: all"
    )
    shuffle: bool = Field(False, description="examples at random, not the first")
    seed: int = Field(0, ge=0, lt=NUM_SEEDS, description="of what is random")
    held_out: float = Field(0.0, ge=0, lt=1, description="share of the examples to stop by")
    batch_size: int = Field(32, ge=1, le=MOST_AT_ONCE, description="examples at once, at most")
    max_tokens: int = Field(
        4096, ge=1, le=MOST_AT_ONCE, description="tokens at once, at most, with padding"
    )

    @model_serializer(mode="wrap")
    def _as_given(self, handler: Any) -> dict[str, Any]:
        values = handler(self)
        return {"path": values.pop("data"), **values}

    @property
    def task_file(self) -> TaskFile:
        """The task file that the path names, if it does, and what is given here."""
        given = {k: getattr(self, k) for k in TaskFile.model_fields if k in self.model_fields_set}
        if Path(self.data).suffix not in (".yaml", ".yml"):
            return TaskFile(**given)
        described = read_task_file(self.data)
        return described.model_copy(update={k: v for k, v in given.items() if k != "data"})

    def choice(self, described: TaskFile) -> ExampleChoice:
        return ExampleChoice(
            self.num_examples or None,
            self.shuffle,
            described.columns,
            described.wordings,
            self.batch_size,
            self.max_tokens,
        )

    @property
    def statistics_options(self) -> CollectionOptions:
        """How statistics of inputs are collected."""
        return make_collection_options(statistics="gram", seed=self.seed, held_out=self.held_out)


def as_model_data(value: Any) -> Any:
    """Accept a path alone in place of a mapping with `path`."""
    if isinstance(value, (str, Path)):
        return {"path": str(value)}
    if isinstance(value, Mapping) and isinstance(value.get("path"), Path):
        return {**value, "path": str(value["path"])}
    if not isinstance(value, (Mapping, ModelData, NoneType)):
        raise ValueError(
            f"expected the path of data, or a mapping with `path`, found {type(value).__name__}"
        )
    return value
