"""What a method is handed: the same numbers of every model, at the grain it asks for.

A method never sees a whole model. Engines cut parameters into *sites*:

    STRETCH   some consecutive elements of one parameter, few enough to stay in the processor's
              cache; for methods that treat every element alike
    TENSOR    a whole parameter in its shape; for methods that need, say, its singular vectors
    LAYER     a weight, perhaps with its bias, and every model's statistics of it
"""

import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from matsmerge.methods.layer import LayerWork

BLOCK_ELEMENTS = 1 << 18  # a stretch is at most this long, and begins at a multiple of it


class Grain(Enum):
    """How much of a model a method has to see at once."""

    STRETCH = "stretch"
    TENSOR = "tensor"
    LAYER = "layer"


class Read(Protocol):
    """Reads elements `start` to `stop` of a parameter, in the precision to compute in.

    The values are new ones, or are put into `out`.
    """

    def __call__(self, start: int, stop: int, out: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Shares:
    """Options of methods that each model may have of its own."""

    density: float = 1.0  # share of the entries of a task vector to keep
    gamma: float = 0.0  # share of the largest entries to drop
    epsilon: float = 0.0  # how much more likely than the density the largest entries are kept
    importance: float = 1.0  # how much more it counts in systems that are solved than in the init


@dataclass(frozen=True)
class SiteTask:
    """One model's part in a merge: how much it counts, and its values at a site."""

    model: str
    weight: float
    shares: Shares
    start: int
    stop: int
    read: Read

    @property
    def density(self) -> float:
        return self.shares.density

    def load(self, out: Tensor | None = None) -> Tensor:
        """The model's values at the site, flat."""
        return self.read(self.start, self.stop, out)


# What a method has learned before it merges: small, and plain enough for merge.json.
Measured = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Site:
    """Elements `start` to `stop` of one parameter, in all models.

    A tensor's site has all elements of it. A layer's is that of its weight; `layer` has the sites
    of its other parameters, and the statistics.
    """

    parameter: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    stop: int
    tasks: Sequence[SiteTask]
    read_base: Read
    measured: Measured = field(default_factory=dict)
    layer: "LayerWork | None" = None

    def load_base(self, out: Tensor | None = None) -> Tensor:
        """The base's values at the site, flat."""
        return self.read_base(self.start, self.stop, out)

    def part(self, start: int, stop: int) -> "Site":
        """The site of some of its elements, counted from the parameter's first."""
        tasks = tuple(
            SiteTask(t.model, t.weight, t.shares, start, stop, t.read) for t in self.tasks
        )
        return Site(self.parameter, self.shape, start, stop, tasks, self.read_base, self.measured)

    def whole_rows(self, length: int) -> "tuple[Site, slice]":
        """The rows of a length that the site is in, and where it is in them."""
        first, last = self.start // length * length, -(-self.stop // length) * length
        return self.part(first, last), slice(self.start - first, self.stop - first)

    def stretches(self) -> "Generator[Site]":
        """The site cut into stretches."""
        for start in range(self.start, self.stop, BLOCK_ELEMENTS):
            yield self.part(start, min(start + BLOCK_ELEMENTS, self.stop))


@dataclass(frozen=True)
class MergedSite:
    """Merged values of one or several parameters, and what there is to say about them."""

    values: Mapping[str, Tensor]
    # The values after some iterations of the last solver, where the merge keeps those.
    kept: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    # For merge.json, by parameter.
    reports: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


_scratch = threading.local()


def scratch(use: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory for one use within a stretch, which its thread uses again at the next stretch.

    Its dtype and device are those of another tensor.

    Allocating it anew for each of thousands of stretches would scatter the little that is kept of
    them over gigabytes.
    """
    if shape[-1] != BLOCK_ELEMENTS:
        return like.new_empty(shape)
    kept: dict[str, Tensor] = _scratch.__dict__
    found = kept.get(use)
    if found is None or (found.shape, found.dtype, found.device) != (
        shape,
        like.dtype,
        like.device,
    ):
        found = kept[use] = like.new_empty(shape)
    return found


def weighted_sum(site: Site, coefficients: Sequence[float]) -> Tensor:
    """sum_m c_m theta_m."""
    result = site.tasks[0].load().mul_(coefficients[0])
    values = scratch("values", tuple(result.shape), result)
    for task, coefficient in zip(site.tasks[1:], coefficients[1:], strict=True):
        result.add_(task.load(out=values), alpha=coefficient)
    return result


def add_models(site: Site, base_coefficient: float, coefficients: Sequence[float]) -> Tensor:
    """c_0 theta_base + sum_m c_m theta_m.

    Task vectors added to the base, written this way, give back a single model exactly.
    """
    result = site.load_base().mul_(base_coefficient)
    values = scratch("values", tuple(result.shape), result)
    for task, coefficient in zip(site.tasks, coefficients, strict=True):
        result.add_(task.load(out=values), alpha=coefficient)
    return result


def load_deltas(site: Site, base: Tensor) -> Generator[tuple[SiteTask, Tensor]]:
    """Each task with its task vector `theta_m - theta_base`, one at a time.

    They share their memory: a task vector is gone when the next one is asked for.
    """
    delta = scratch("delta", tuple(base.shape), base)
    for task in site.tasks:
        yield task, task.load(out=delta).sub_(base)


def stack_deltas(site: Site, base: Tensor) -> Tensor:
    """All task vectors at a site, (models, elements); the next site will use their memory."""
    deltas = scratch("deltas", (len(site.tasks), len(base)), base)
    for row, task in zip(deltas, site.tasks, strict=True):
        task.load(out=row).sub_(base)
    return deltas


def total_weight(tasks: Sequence[SiteTask]) -> float:
    """What to divide a weighted sum by; 1 for the sum of nothing."""
    return sum(task.weight for task in tasks) or 1.0
