"""What a merging method is.

A method is a frozen set of hyperparameters that merges sites. Its grain says what a site is; what
it must know of a whole parameter or model before it can merge one, it asks for in `measure`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from matsmerge.methods.options import Options
from matsmerge.methods.site import (
    BLOCK_ELEMENTS,
    Grain,
    Measured,
    MergedSite,
    Shares,
    Site,
    SiteTask,
)

if TYPE_CHECKING:
    from matsmerge.methods.layer import Layer, ParameterHeader
    from matsmerge.methods.objectives.objective import Evidence

# Tensors of a parameter's size that merging a whole one holds at once, besides one for each model.
_SCRATCH_TENSORS = 4


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


class Method(Options, ABC):
    """Hyperparameters, and what to do with them."""

    grain: ClassVar[Grain] = Grain.STRETCH
    needs_base: ClassVar[bool] = False
    num_models: ClassVar[int | None] = None  # where only one number makes sense
    shares_of_models: ClassVar[tuple[str, ...]] = ("density",)  # options models may have themselves
    is_isotropic: ClassVar[bool] = False  # are all singular values of its changes the same?

    @abstractmethod
    def merge(self, site: Site) -> Tensor | MergedSite:
        """The merged values at a site: a tensor of as many elements, or with reports on them."""

    def measure(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:  # noqa: ARG002
        """Learn what `merge` needs to know beyond a site; it becomes `site.measured`."""
        return {}
        yield

    def measured_of(self, parameter: str, measured: Measured) -> Measured:  # noqa: ARG002
        """What one parameter needs of what was learned of all that are measured together."""
        return measured

    @property
    def measured_over(self) -> Literal["parameter", "model"] | None:
        """What has to be read in full before the first site can be merged."""
        return None

    @property
    def measured_as(self) -> object:
        """Parameters that are measured over the model are so with others that have the same."""
        return type(self)

    # What a recipe has to know of it.

    @property
    def reads_base(self) -> bool:
        return self.needs_base

    @property
    def only_model(self) -> str | None:
        """The only model it reads, or 'base'; None if it reads all."""
        return None

    @property
    def needed_models(self) -> int | None:
        return self.num_models

    def own_share(self, key: str) -> float | None:
        """A share (a field of `Shares`) of models that have none of their own.

        None if it has no use for one.
        """
        return getattr(self, key, None) if key in self.shares_of_models else None

    def share_problem(self, shares: Shares) -> str | None:  # noqa: ARG002
        """Why a model's shares have no meaning."""
        return None

    @property
    def weights_covariances(self) -> bool:
        """Whether weights scale covariances, which must not be negative."""
        return False

    @property
    def divides_by_weights(self) -> bool:
        """Whether the sum of the models' weights must not be zero."""
        return False

    @property
    def may_add_nothing(self) -> bool:
        """Whether it gives the base where it divides by weights that are all zero."""
        return False

    @property
    def matches_heads(self) -> bool:
        """Whether heads are matched to the merged model unless the recipe says otherwise."""
        return False

    @property
    def iterates(self) -> bool:
        """Whether it has iterations that a trajectory can be made of."""
        return False

    def refusals(self, num_models: int) -> Iterable[str]:  # noqa: ARG002
        """Why these hyperparameters have no meaning."""
        return ()

    # What it makes of changes, which adapters are.

    @property
    def works_on_changes(self) -> bool:
        """Whether it gives the same with changes from a base as with models and their base."""
        return True

    @property
    def works_in_core_space(self) -> bool:
        """Whether it has a meaning for changes in other bases of their outputs and inputs."""
        return self.works_on_changes

    def coefficients(self, weights: Sequence[float]) -> list[float] | None:  # noqa: ARG002
        """c_m, where the merged model is theta_base + sum_m c_m (theta_m - theta_base)."""
        return None

    def for_vectors(self) -> Self:
        """The method for (IA)^3 vectors; raises `RecipeError` if it has no meaning for them."""
        return self

    # What a method of whole tensors or of layers has to say before a merge, from headers alone.

    def tensor_bytes(self, shape: Sequence[int], num_models: int) -> int:
        """Memory for merging a whole parameter, at most; for methods of the grain TENSOR."""
        return (num_models + _SCRATCH_TENSORS) * math.prod(shape) * torch.float64.itemsize

    def layers(
        self,
        own: Collection[str],  # noqa: ARG002
        parameters: Mapping[str, "ParameterHeader"],  # noqa: ARG002
        evidence: Sequence["Evidence"],  # noqa: ARG002
    ) -> list["Layer"]:
        """Which of its own parameters are merged together, and with what.

        For methods of the grain LAYER; `parameters` are all of the merge.
        """
        return []

    @property
    def fallback(self) -> "Method":
        """What merges the parameters that are in no layer; of another grain than LAYER."""
        return self

    @property
    def start(self) -> "Method":
        """What makes the values that all else starts from."""
        return self

    @property
    def held_models(self) -> frozenset[str]:
        """Models for whose data the start, and not the model itself, says what is right."""
        return frozenset()

    @property
    def needed_statistics(self) -> list[str]:
        """Kinds of statistics, in the order in which they are used."""
        return []

    @property
    def uses_held_out(self) -> bool:
        """Whether it needs statistics of held-out data too."""
        return False

    @property
    def uses_inputs(self) -> bool:
        """Whether it uses second moments of layers' inputs."""
        return False

    @property
    def uses_merged_inputs(self) -> bool:
        """Whether these are the inputs in the merged model, for which the models are run."""
        return False

    @property
    def matches_outputs(self) -> bool:
        """Whether layers are then to output what each model's own do for the same example."""
        return False

    def without_inputs(self) -> Self | None:
        """The method as far as it needs the models' own statistics; None if it needs none."""
        return self

    def idle_objectives(self, layers: Sequence["Layer"]) -> Iterator[str]:  # noqa: ARG002
        """The names of its objectives that none of the layers of a merge has a use for."""
        return iter(())

    @property
    def summary(self) -> str:
        """What it does, in a line for people."""
        return self.in_short


def merge_whole(method: Method, site: Site) -> Tensor:
    """A whole parameter merged by a method of stretches or tensors, flat."""
    if method.grain is Grain.TENSOR:
        merged = method.merge(site)
        return values_of(merged, site).flatten()
    result: Tensor | None = None
    for part in site.stretches():
        values = values_of(method.merge(part), part)
        if result is None:
            result = values.new_empty(site.stop - site.start)
        result[part.start - site.start : part.stop - site.start] = values
    assert result is not None, "a site has elements"
    return result


def values_of(merged: Tensor | MergedSite, site: Site) -> Tensor:
    """The values of a site's own parameter."""
    return merged if isinstance(merged, Tensor) else merged.values[site.parameter]
