"""One of the models that are merged along their blocks, and its data."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matsmerge.checkpoints.alignment import AlignedModel
from matsmerge.checkpoints.checkpoint import dtype_name
from matsmerge.data.rows import Data
from matsmerge.errors import MatsError
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.recipes.model_data import ModelData
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.joined_statistics import with_own
from matsmerge.statistics.prepared_collection import PreparedCollection, prepare_collection
from matsmerge.statistics.statistics import Statistics
from matsmerge.statistics.task_data import TaskData
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.task_file import TaskFile

REHEARSED_EXAMPLES = 3


@dataclass(frozen=True)
class AskedModel:
    """A model and its data, as the recipe has it and as it was read."""

    model: AlignedModel
    entry: ModelData
    described: TaskFile
    rows: Data
    device: str | None = None  # to run it on; a GPU if there is one

    def load(self, dtype: torch.dtype) -> LoadedModel:
        assert self.model.checkpoint.folder is not None
        return load_model(
            self.model.checkpoint.folder,
            self.described,
            need_targets=False,
            dtype=dtype_name(dtype),
            device=self.device,
            also=["*"],
        )

    def few(self) -> "AskedModel":
        """The first examples alone."""
        changes = {"num_examples": REHEARSED_EXAMPLES, "held_out": 0.0, "shuffle": False}
        return replace(self, entry=self.entry.model_copy(update=changes))

    def prepare(self, loaded: LoadedModel, kinds: Sequence[str] = ()) -> PreparedCollection:
        """Choose and encode examples; Fisher information is the true one, which needs no labels."""
        options = self.entry.statistics_options
        if kinds:
            options = options.model_copy(update={"statistics": tuple(kinds), "fisher": "true"})
        return prepare_collection(loaded, self.rows, options, self.entry.choice(self.described))


@dataclass(frozen=True)
class PrefixTask:
    """One of the models and its data."""

    asked: AskedModel
    data: TaskData
    own: Evidence | None  # the model's own statistics, for all that is not about inputs
    names: Mapping[str, str]  # of the running model's tensors in this one's checkpoint
    heads: Mapping[str, str]  # the same for what is not merged
    num_held_bytes: int = 0  # about, when all examples have been through all blocks

    @property
    def model(self) -> AlignedModel:
        return self.asked.model

    @property
    def options(self) -> CollectionOptions:
        return self.asked.entry.statistics_options

    @property
    def label(self) -> str:
        return self.model.checkpoint.label

    def load(self, tensor: str) -> Tensor:
        """The value that the model has of a tensor."""
        return self.model.checkpoint[self.names.get(tensor) or self.heads[tensor]]

    def num_bytes(self, tensors: Iterable[str]) -> int:
        return sum(self.model.checkpoint.spec(self.names[n]).num_bytes for n in tensors)

    def evidence(self, inputs: Statistics) -> Evidence:
        """Statistics of inputs as evidence, with this model's own for all else."""
        if self.own is None:
            return Evidence(self.label, inputs, self.model.names)
        return replace(self.own, statistics=with_own(inputs, self.own.statistics))


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Say whose problem it is."""
    try:
        yield
    except MatsError as error:
        raise type(error)([f"{label}: {problem}" for problem in error.problems]) from error
