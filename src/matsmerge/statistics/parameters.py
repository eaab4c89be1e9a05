"""The parameters statistics are collected of, and the modules that hold them."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from matsmerge.errors import RecipeError, closest
from matsmerge.models.experts import RoutedExperts, Routing
from matsmerge.statistics.linear_maps import (
    LinearMap,
    find_linear_map,
    find_norm,
    find_scale,
    find_whole_scale,
)

FindMap = Callable[[str, nn.Module], LinearMap | None]


@dataclass(frozen=True)
class Owned:
    """A parameter, and every module that holds it as its own (several where it is tied)."""

    name: str
    parameter: nn.Parameter
    owners: tuple[tuple[str, str], ...]  # (module, attribute)
    is_whole: bool = True  # False: some of its owners hold a copy of it

    @property
    def modules(self) -> set[str]:
        return {module for module, _ in self.owners}

    @property
    def is_here(self) -> bool:
        """Can gradients be taken of it, or is it elsewhere until its module runs?"""
        return self.is_whole and not self.parameter.is_meta

    @property
    def is_vector(self) -> bool:
        return self.parameter.numel() == max(self.parameter.shape, default=1)

    @property
    def aliases(self) -> list[str]:
        """All names but the first."""
        return [name for m, a in self.owners if (name := f"{m}.{a}".lstrip(".")) != self.name]


def find_parameters(model: nn.Module, patterns: Sequence[str]) -> dict[str, Owned]:
    """The parameters that require gradients and match one of the patterns."""
    owners = defaultdict(list)
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            owners[id(parameter)].append(_user(model, module_name, attribute))
    trainable = {
        name: Owned(name, parameter, tuple(owners[id(parameter)]))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if not trainable:
        raise RecipeError(
            "no parameter of the model requires gradients; those that statistics are wanted of "
            "must (parameter.requires_grad_())"
        )
    RecipeError.raise_all(
        f"parameters: '{pattern}' matches no trainable parameter{closest(pattern, trainable)}"
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in trainable)
    )
    return {
        name: owned
        for name, owned in trainable.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def join_tied(parameters: Mapping[str, Owned], names: Mapping[str, str]) -> dict[str, Owned]:
    """Make one of the parameters that are one tensor of the checkpoint.

    A model that is spread over devices may hold a tied weight several times.
    """
    joined: dict[str, Owned] = {}
    for owned in parameters.values():
        stored = names[owned.name]
        first = joined.get(stored, owned)
        owners = tuple(dict.fromkeys([*first.owners, *owned.owners]))
        joined[stored] = replace(first, owners=owners, is_whole=first is owned)
    return {owned.name: owned for owned in joined.values()}


def _user(model: nn.Module, module: str, attribute: str) -> tuple[str, str]:
    """The module that uses a parameter: where it is held by a mere container, the one around."""
    while isinstance(model.get_submodule(module), (nn.ParameterDict, nn.ParameterList)):
        module, _, container = module.rpartition(".")
        attribute = f"{container}.{attribute}"
    return module, attribute


# Ways to see a module as a linear map: in a model of its own without and with a metric of outputs,
# and in the merged one beside it. Without a metric what is scaled says nothing of its scale but
# beside what another model scales.
PLAIN: Sequence[FindMap] = (find_linear_map,)
WITH_METRIC: Sequence[FindMap] = (find_linear_map, find_whole_scale)
BESIDE_OWN: Sequence[FindMap] = (find_linear_map, find_norm, find_scale)
BESIDE_OWN_WITH_METRIC: Sequence[FindMap] = (find_linear_map, find_norm, find_whole_scale)


def find_maps(
    model: nn.Module,
    parameters: Mapping[str, Owned],
    kinds: Sequence[FindMap] = PLAIN,
) -> list[LinearMap]:
    """The linear maps, of these kinds, whose weight is among the parameters."""
    owners = {owner for owned in parameters.values() for owner in owned.owners}
    modules = {module for module, _ in owners}
    named = [(name, m) for name, m in model.named_modules() if name in modules]
    found = (next(filter(None, (find(name, m) for find in kinds)), None) for name, m in named)
    routing = {
        f"{name}.{expert}": own
        for name, m in model.named_modules()
        if isinstance(m, RoutedExperts)
        for expert, own in m.routing.items()
    }
    return [
        replace(m, routing=_routing_of(m.name, routing))
        for m in found
        if m is not None and (m.name, m.attribute) in owners
    ]


def _routing_of(name: str, routing: Mapping[str, Routing]) -> Routing | None:
    """The tokens of the expert that a module is in."""
    while name and name not in routing:
        name = name.rpartition(".")[0]
    return routing.get(name)
