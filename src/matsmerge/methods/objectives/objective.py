"""What an objective is: the covariance C_m that says which directions of a model matter.

Before a merge begins, an objective is asked what it has for each parameter, from headers alone.
While it runs, it makes one model's operator at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from matsmerge.linalg.operators import Operator
from matsmerge.linalg.system import System
from matsmerge.methods.options import Options
from matsmerge.statistics.statistics import MAIN, Map, Statistics

SeenAs = Literal["as it is", "vector", "linear", "conv1d", "conv2d", "embedding", "norm", "scale"]


@dataclass(frozen=True)
class View:
    """A parameter seen as the matrix (out, in) of a linear map, or (groups, out, in)."""

    seen: SeenAs
    num_groups: int = 1

    @property
    def is_vector(self) -> bool:
        """Is it a vector of scales, as the one row of a matrix?"""
        return self.seen == "scale" and self.num_groups == 1

    def matrix(self, values: Tensor) -> Tensor:
        if self.seen == "vector":
            return values.reshape(1, -1)
        if self.seen in ("conv1d", "embedding"):
            return values.mT
        if self.seen in ("norm", "scale"):
            return values.view(-1, 1, 1) if self.num_groups > 1 else values.view(1, -1)
        if self.seen == "conv2d":
            flat = values.flatten(1)
            return flat.view(self.num_groups, -1, flat.shape[1]) if self.num_groups > 1 else flat
        return values

    def values(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """The parameter of a matrix; the inverse of `matrix`."""
        return (matrix.mT if self.seen in ("conv1d", "embedding") else matrix).reshape(tuple(shape))

    def join(self, matrix: Tensor, bias: Tensor) -> Tensor:
        """The matrix with the bias as its last column, that of a constant input 1."""
        column = bias.view(*matrix.shape[:-1], 1)
        return torch.cat([matrix, column], dim=-1)


@dataclass(frozen=True)
class Evidence:
    """One model's statistics, under the names that all models share."""

    label: str
    statistics: Statistics
    names: Mapping[str, str]  # shared name -> name in the statistics

    def on(self, device: str) -> "Evidence":
        """The same, with arrays that are read to a device."""
        if device == self.statistics.device:
            return self
        return replace(self, statistics=replace(self.statistics, device=device))

    def maps_of(self, parameter: str) -> list[Map]:
        """The linear maps a parameter is the weight of, none of them an embedding if it can be.

        An embedding that is also the output layer is merged as the latter.
        """
        names = dict.fromkeys(self.names_of(parameter))
        found = [m for name in names for m in self._maps.get(name, ())]
        others = [m for m in found if m.layout != "embedding"]
        return others or found

    def is_unused(self, parameter: str) -> bool:
        """Is it of an expert to which none of the model's tokens was routed?"""
        return self.statistics.header.is_unused(self.names[parameter])

    def has_inputs(self, m: Map) -> bool:
        """Did a map receive anything in the main set? An expert may have in the held-out alone."""
        return self.statistics.has(f"inputs/{m.inputs}")

    def has_sketch(self, key: str) -> bool:
        """Is an array of the main set a sketch, known by its leading directions?"""
        return self.statistics.header.forms.get(f"{MAIN}/{key}") == "sketch"

    def names_of(self, parameter: str) -> list[str]:
        """A parameter's names in the statistics; tied weights have several."""
        name, aliases = self.names[parameter], self.statistics.header.aliases
        kept = aliases.get(name, name)
        return [name, kept, *(other for other, of in aliases.items() if of == kept)]

    @cached_property
    def shared(self) -> dict[str, str]:
        """The shared name of every name in the statistics."""
        return {own: name for name in self.names for own in self.names_of(name)}

    @cached_property
    def _maps(self) -> dict[str, list[Map]]:
        maps: dict[str, list[Map]] = {}
        for m in self.statistics.header.maps:
            maps.setdefault(m.weight, []).append(m)
        return maps


@dataclass(frozen=True)
class Found:
    """What an objective has for a parameter, in every model."""

    view: View
    num_outputs: int
    num_inputs: int
    keys: tuple[tuple[str, ...], ...] = ()  # for each model, where in its statistics
    bias: str | None = None  # the parameter that is joined to it
    num_bytes: int = 0  # of the statistics, as they are stored
    is_dense: bool = False  # is there a matrix (in, in), and not only a diagonal or a few rows?
    sharing: tuple[object, ...] | None = None  # parameters with equal ones have the same A
    # Leading directions of all models together, if they have no more of any moment.
    input_rank: int | None = None
    output_rank: int | None = None


@dataclass(frozen=True)
class Subject:
    """A parameter an objective is asked about."""

    parameter: str
    shape: tuple[int, ...]
    view: View  # what is known of it without statistics
    evidence: tuple[Evidence, ...]  # of every model; empty where no statistics are used


@dataclass(frozen=True)
class Part:
    """What one model's covariance for a parameter is made from."""

    keys: tuple[str, ...]  # where in its statistics
    evidence: Evidence | None
    of: str  # the set of its statistics
    load_delta: Callable[[], Tensor]  # W_m - W_base (out, in), float64


class Objective(Options, ABC):
    """Hyperparameters of a covariance, and how to make it."""

    statistic: ClassVar[str | None] = None  # what must have been collected
    needs_base: ClassVar[bool] = False
    uses_inputs: ClassVar[bool] = False  # are its covariances second moments of layers' inputs?
    has_output_factors: ClassVar[bool] = False  # and Kronecker products with those of outputs?
    for_vectors: ClassVar[bool] = True  # has it a meaning for (IA)^3 and other scales?

    @property
    def needs_own_statistics(self) -> bool:
        """Whether it needs more than second moments of inputs, which may be another model's."""
        return self.statistic is not None and (not self.uses_inputs or self.has_output_factors)

    @abstractmethod
    def find(self, subject: Subject) -> Found | None:
        """What there is for a parameter; None if nothing in any model.

        Raises `StatisticsError` if only some of the models have it, or it does not fit.
        """

    @abstractmethod
    def operator(self, found: Found, part: Part) -> Operator:
        """A model's covariance."""

    @property
    def for_features(self) -> "Objective":
        """The same where every feature is scaled by itself."""
        return self

    @property
    def merges_norms(self) -> bool:
        """Whether it has something for norms, which only merging along the merged model gives."""
        return False

    @property
    def is_anchored(self) -> bool:
        """Whether the init holds on, as one more term of the system."""
        return False

    def anchored(self, system: System) -> System:
        """The system with the hold that the init has."""
        return system
