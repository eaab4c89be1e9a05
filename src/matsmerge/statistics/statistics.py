"""What was measured: arrays, and a header that says what each of them is.

Each kind of statistic has a file in `statistics/kinds/` with its formula. The paper writes 1/N for
both factors of K-FAC; the counts are kept, so that any other scale can be had from these arrays.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from torch import Tensor

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.errors import StatisticsError
from matsmerge.linalg.nystrom import truncate_factor
from matsmerge.linalg.triangle import unpack_upper
from matsmerge.linalg.truncated import Truncated
from matsmerge.notebook_table import notebook_table
from matsmerge.statistics.collection_options import CollectionOptions, Rank
from matsmerge.statistics.kinds import KINDS
from matsmerge.statistics.kinds.sketch_sum import scaled
from matsmerge.statistics.kinds.statistic import Form, Statistic, StoredTensor
from matsmerge.statistics.linear_maps import MapLayout
from matsmerge.statistics.marks import Marks

# Of files; the second has sketches in eight bits (`coded_sketches.py`).
PLAIN_VERSION, CODED_VERSION = 1, 2

MAIN, HELD_OUT = "main", "held_out"
UNROUTED = "no token of the data was routed to this expert"  # why it has no statistics

WholeNumber = Annotated[int, Field(strict=True, ge=0, le=2**53)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Map(_Part):
    """A linear map of the model: `linear` W z, `conv1d` zᵀ W, `conv2d` of patches, `embedding`.

    A `norm` and a `scale`, of (IA)^3, are of a single input for each feature. With a metric of
    outputs a `scale` has moments of whole rows.
    """

    module: str
    layout: MapLayout
    weight: str
    bias: str | None
    inputs: str | None  # the map whose input this one shares; arrays `inputs/…` and `mean/…`
    outputs: Annotated[bool, Field(strict=True)]  # is there an array such as `outputs/MODULE`?


class Set(_Part):
    """How much a set of statistics is made of."""

    num_examples: WholeNumber
    num_rows: dict[str, WholeNumber]  # of each `inputs/…`
    marks: Marks | None = None  # of a classifier, where examples have labels


class Origin(_Part):
    """A model or data, by name and fingerprint; of data, the split it is of its task's."""

    name: str
    fingerprint: str
    split: str | None = None


class Sketching(_Part):
    """How the arrays of the form `sketch` are kept."""

    rank: Rank  # leading directions


class Header(_Part):
    """Everything but the numbers; JSON in the file's header."""

    format_version: int = PLAIN_VERSION
    model: Origin
    data: tuple[Origin, ...]
    options: CollectionOptions
    versions: dict[str, str]
    maps: tuple[Map, ...]
    sets: dict[str, Set]
    forms: dict[str, Form]  # of each array, named SET/KEY
    aliases: dict[str, str]  # other names of tied parameters
    without: dict[str, dict[str, str]]  # kind -> parameter without it -> why
    sketching: Sketching | None = None  # if there are sketches

    @model_serializer(mode="wrap")
    def _without_nothing(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What has no sketches is described as it was before there were any."""
        content: dict[str, Any] = handler(self)
        return {k: v for k, v in content.items() if (k, v) != ("sketching", None)}

    @property
    def num_examples(self) -> int:
        return sum(s.num_examples for s in self.sets.values())

    def is_unused(self, parameter: str) -> bool:
        """Is it of an expert to which no token was routed?"""
        return any(reasons.get(parameter) == UNROUTED for reasons in self.without.values())


@dataclass(frozen=True)
class Statistics:
    """A header and its arrays, in memory or read from a file one at a time, to a device."""

    header: Header
    arrays: Checkpoint
    device: str = "cpu"

    def __repr__(self) -> str:
        header = self.header
        kinds = ", ".join(self.kinds)
        return f"<Statistics {kinds} of {header.model.name}, {header.num_examples} examples>"

    def _repr_html_(self) -> str:
        header = self.header
        marks = header.sets[MAIN].marks
        return notebook_table(
            "Statistics",
            {
                "kinds": ", ".join(self.kinds),
                "model": header.model.name,
                "data": ", ".join(origin.name for origin in header.data),
                "examples": header.num_examples,
                "linear maps": len(header.maps),
            }
            | ({"right": f"{marks.accuracy:.1%}"} if marks is not None and marks.num else {}),
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.header.options.statistics

    def stored(self, key: str, of: str = MAIN) -> Tensor:
        """An array as it is stored."""
        return self.arrays.read_whole(f"{of}/{key}", self.device)

    def has(self, key: str, of: str = MAIN) -> bool:
        return f"{of}/{key}" in self.arrays.specs

    def array(self, key: str, of: str = MAIN) -> Tensor:
        """An array as what it means: a full symmetric matrix for all but `diagonal` and `full`.

        Of a sketch there are the leading directions; what is left of the trace is in all others.
        """
        truncated = self.truncated(key, of)
        if truncated is not None:
            return truncated.dense()
        stored = self.stored(key, of)
        form = self.header.forms[f"{of}/{key}"]
        if form == "symmetric":
            return unpack_upper(stored)
        if form == "rows":
            return stored.mT @ stored / self.header.sets[of].num_examples
        return stored

    def truncated(self, key: str, of: str = MAIN, *, bias: bool = False) -> Truncated | None:
        """A second moment by its leading directions; None where it is not a sketch.

        With `bias`, of inputs with a constant 1 appended.
        """
        if self.header.forms.get(f"{of}/{key}") != "sketch":
            return None
        stored = self.stored(key, of)  # (d, r + 1)
        array, _, name = key.partition("/")
        if array == "inputs" and self.has(f"mean/{name}", of) and not bias:
            stored = stored[:-1]
        if not bool(stored.isfinite().all()):
            raise StatisticsError(
                f"{self.arrays.label}: array '{of}/{key}' holds NaN or Inf; the file is damaged, "
                "collect again"
            )
        trace = float(stored[:, -1].double().sum())
        return truncate_factor(stored[:, :-1], trace)

    def map_of(self, module: str) -> Map:
        """The linear map of a module's name."""
        found = next((m for m in self.header.maps if m.module == module), None)
        if found is None:
            raise StatisticsError(f"there is no linear map '{module}' in these statistics")
        return found

    def gram(self, module: str, of: str = MAIN, *, bias: bool = False) -> Tensor:
        """Second moment of a map's inputs; a vector, its diagonal, for embeddings.

        With `bias`, of the inputs with a constant 1 appended.
        """
        truncated = self.truncated_gram(module, of, bias=bias)
        if truncated is not None:
            return truncated.dense()
        leader = self.map_of(module).inputs
        gram = self.array(f"inputs/{leader}", of)
        if not bias:
            return gram
        return with_constant(gram, self.stored(f"mean/{leader}", of), gram.shape[-1])

    def truncated_gram(
        self, module: str, of: str = MAIN, *, bias: bool = False
    ) -> Truncated | None:
        """Second moment of a map's inputs by its leading directions; None if it is kept in full.

        With `bias`, of the inputs with a constant 1 appended.
        """
        leader = self.map_of(module).inputs
        if leader is None or not self.has(f"inputs/{leader}", of):
            raise StatisticsError(f"there is no Gram matrix of '{module}' in these statistics")
        if bias and not self.has(f"mean/{leader}", of):
            raise StatisticsError(
                f"the mean input of '{module}' was not kept, which joining its bias needs; "
                "collect without --no-bias"
            )
        return self.truncated(f"inputs/{leader}", of, bias=bias)

    def pairs(self, module: str, of: str = MAIN, *, bias: bool = False) -> Tensor | None:
        """Second moment of [z; δ], where a map was watched beside a model's own; None elsewhere.

        With `bias`, of [z; 1; δ; 0].
        """
        leader = self.map_of(module).inputs
        if not self.has(f"pairs/{leader}", of):
            return None
        pairs = self.array(f"pairs/{leader}", of)
        if not bias:
            return pairs
        mean = self.stored(f"pairs_mean/{leader}", of)
        joined = with_constant(pairs, mean, pairs.shape[-1] // 2)
        return torch.nn.functional.pad(joined, (0, 1, 0, 1))

    def output_factor(self, module: str, of: str = MAIN) -> Tensor:
        """Second moment of the gradients at a map's outputs, summed over an example's rows."""
        return self.array(f"outputs/{module}", of)

    def truncated_output_factor(self, module: str, of: str = MAIN) -> Truncated | None:
        """The same by its leading directions; None if it is kept in full."""
        return self.truncated(f"outputs/{module}", of)

    def fisher(self, parameter: str, of: str = MAIN) -> Tensor:
        """Diagonal of the Fisher information matrix, in the parameter's shape."""
        return self.array(f"fisher/{parameter}", of)

    def block_fisher(self, parameter: str, of: str = MAIN) -> Tensor:
        """Block of the Fisher information matrix for a vector parameter."""
        return self.array(f"block_fisher/{parameter}", of)

    def parameters(self, kind: str) -> list[str]:
        """The parameters that have a kind of statistic."""
        return KINDS[kind].parameters(self.header)


def with_constant(moment: Tensor, mean: Tensor, at: int) -> Tensor:
    """The second moment of rows that have a constant 1 inserted at a place."""
    rows = torch.cat([moment[..., :at, :], mean[..., None, :], moment[..., at:, :]], -2)
    ones = mean.new_ones(*mean.shape[:-1], 1)
    column = torch.cat([mean[..., :at], ones, mean[..., at:]], -1)[..., None]
    return torch.cat([rows[..., :at], column, rows[..., at:]], -1)


@dataclass(frozen=True)
class Summed:
    """The sums of a statistic for one map or parameter, by array."""

    kind: Statistic[Any]
    name: str
    num_rows: int
    sums: Mapping[str, StoredTensor]


def statistics_of(
    header: Header,
    sets: Mapping[str, tuple[int, Iterable[Summed]]],
    marks: Mapping[str, Marks | None],
) -> Statistics:
    """Means of the sums of each set, which comes with its number of examples.

    The header says all that the sums do not.
    """
    arrays: dict[str, Tensor] = {}
    forms: dict[str, Form] = {}
    described: dict[str, Set] = {}
    for of, (num_examples, found) in sets.items():
        num_rows: dict[str, int] = {}
        for one in found:
            count = num_examples
            if one.kind.is_per_row:
                count = num_rows[f"{one.kind.array}/{one.name}"] = one.num_rows
            for array, (summed, form) in one.sums.items():
                key = f"{of}/{array}/{one.name}"
                if form == "sketch":
                    mean = scaled(summed, 1 / count)
                else:
                    mean = summed if form == "rows" else summed / count
                arrays[key], forms[key] = mean.cpu(), form
        described[of] = Set(num_examples=num_examples, num_rows=num_rows, marks=marks.get(of))
    return in_memory(header.model_copy(update={"sets": described, "forms": forms}), arrays)


def in_memory(header: Header, arrays: Mapping[str, Tensor]) -> Statistics:
    """Statistics of arrays named `SET/KEY`."""
    return Statistics(header, InMemoryCheckpoint("statistics", arrays))


def check_belongs(statistics: Statistics, model: Checkpoint, *, can_be_forced: bool = True) -> None:
    """Refuse statistics that were collected from another model."""
    origin, found = statistics.header.model, fingerprint(model)
    if origin.fingerprint != found:
        force = ", or use it all the same with --force" if can_be_forced else ""
        raise StatisticsError(
            f"{statistics.arrays.label}: was collected from another model, '{origin.name}' "
            f"(fingerprint {origin.fingerprint[:16]}), than {model.label} ({found[:16]}); collect "
            f"from this one{force}"
        )
