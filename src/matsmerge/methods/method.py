"""What a merging method is, and what it sees of the models.

A method never sees a whole model. It is handed *sites*: the same stretch of the same
parameter in every model, small enough to stay in the processor's cache. Methods that must know
something of a whole parameter or a whole model first say so by `measured_over`, and ask for it
in `measure`.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

BLOCK_ELEMENTS = 1 << 16  # a site is at most this long, and begins at a multiple of it


class Load(Protocol):
    """Reads the values at a site, in the precision to compute in: anew, or into `out`."""

    def __call__(self, out: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Task:
    """One model's part in a merge: how much it counts, and its values at a site."""

    model: str
    weight: float
    density: float  # share of the changed weights to keep, for methods that drop some
    load: Load


@dataclass(frozen=True)
class Site:
    """Elements `start` to `stop` of one parameter, in all models."""

    parameter: str
    start: int
    stop: int
    tasks: Sequence[Task]
    load_base: Load


# Small, and plain enough for merge.json. Empty if nothing was read.
Measured = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Pass:
    """One reading of the sites: what to note at each of them, and how densely to look.

    Notes from neighbouring sites are folded, so that a large model leaves few of them. With a
    `spacing`, only stretches of `block_elements` that many elements apart are read.
    """

    observe: Callable[[Site], Any]
    fold: Callable[[list[Any]], list[Any]] = list
    spacing: int | None = None
    block_elements: int = BLOCK_ELEMENTS


# Yields passes, is sent what they noted in the order of the sites, returns what it learned.
Measuring = Generator[Pass, list[Any], Measured]


class Method(BaseModel, ABC):
    """Hyperparameters, and what to do with them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    needs_base: ClassVar[bool] = False
    num_models: ClassVar[int | None] = None  # where only one number makes sense

    @classmethod
    def known_parameters(cls, given: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        """What may be given, with its type."""
        return {key: field.annotation for key, field in cls.model_fields.items()}

    @property
    def reads_base(self) -> bool:
        return self.needs_base

    @property
    def needed_models(self) -> int | None:
        return self.num_models

    @property
    def own_density(self) -> float | None:
        """The density of models that have none of their own; None if it has no use for one."""
        return getattr(self, "density", None)

    @property
    def weights_covariances(self) -> bool:
        """Whether weights scale covariances, which must not be negative."""
        return False

    @property
    def measured_as(self) -> type["Method"]:
        """Parameters that are measured over the model are so with others of the same class."""
        return type(self)

    @property
    def measured_over(self) -> Literal["parameter", "model"] | None:
        """What has to be read in full before the first site can be merged."""
        return None

    @property
    def works_on_changes(self) -> bool:
        """Whether it gives the same with changes from a base as with models and their base."""
        return True

    def coefficients(self, weights: Sequence[float]) -> list[float] | None:  # noqa: ARG002
        """c_m, where the merged model is theta_base + sum_m c_m (theta_m - theta_base)."""
        return None

    @property
    def divides_by_weights(self) -> bool:
        """Whether the sum of the models' weights must not be zero."""
        return False

    def measure(self, tasks: Sequence[Task], num_elements: int) -> Measuring:  # noqa: ARG002
        """Learn what `merge` needs to know beyond a site."""
        return {}
        yield

    @abstractmethod
    def merge(self, site: Site, measured: Measured) -> Tensor:
        """The merged values at a site."""


_scratch = threading.local()


def scratch(use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for one use within a site, which its thread uses again at the next site.

    Allocating it anew for each of thousands of sites would scatter the little that is kept of
    them over gigabytes.
    """
    if shape[-1] != BLOCK_ELEMENTS:
        return torch.empty(shape, dtype=dtype)
    kept: dict[str, Tensor] = _scratch.__dict__
    found = kept.get(use)
    if found is None or found.shape != shape or found.dtype != dtype:
        found = kept[use] = torch.empty(shape, dtype=dtype)
    return found


def combine(site: Site, base_coefficient: float, coefficients: Sequence[float]) -> Tensor:
    """c_0 theta_base + sum_m c_m theta_m.

    Task vectors added to the base, written this way, give back a single model exactly.
    """
    result = site.load_base().mul_(base_coefficient)
    values = scratch("values", result.shape, result.dtype)
    for task, coefficient in zip(site.tasks, coefficients, strict=True):
        result.add_(task.load(out=values), alpha=coefficient)
    return result


def load_deltas(site: Site, base: Tensor) -> Generator[tuple[Task, Tensor]]:
    """Each task with its task vector `theta_m - theta_base`, one at a time.

    They share their memory: a task vector is gone when the next one is asked for.
    """
    delta = scratch("delta", base.shape, base.dtype)
    for task in site.tasks:
        yield task, task.load(out=delta).sub_(base)


def stack_deltas(site: Site, base: Tensor) -> Tensor:
    """All task vectors at a site, (models, elements); the next site will use their memory."""
    deltas = scratch("deltas", (len(site.tasks), len(base)), base.dtype)
    for row, task in zip(deltas, site.tasks, strict=True):
        task.load(out=row).sub_(base)
    return deltas


def total_weight(tasks: Sequence[Task]) -> float:
    return sum(task.weight for task in tasks)
