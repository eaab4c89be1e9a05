"""Models that mergekit merges with each other: those of a slice, a module, or a whole recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matsmerge.methods.method import Method
from matsmerge.recipes.mergekit_methods import MERGEKIT_METHODS, MergekitMethod, find_method


@dataclass(frozen=True)
class Group:
    """Models that are merged with each other, and the settings for that.

    `wheres` say which parameters it is for, as overrides do; none where it is for all. `scopes` are
    parameters of the merge, those that count more first.
    """

    kind: str
    sources: Sequence[tuple[str, Mapping[str, Any]]]  # model, its own parameters
    base: str | None
    scopes: Sequence[Mapping[str, Any]]
    wheres: Sequence[Mapping[str, Any]] = ({},)
    is_renumbered: bool = False  # whether its layers have other numbers than in the models

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.sources]

    @property
    def has_base_apart(self) -> bool:
        """Whether its base is the base of our method, and not one of the models."""
        known, ours = find_method(self.kind)
        return self.base is not None and known.base != "ignored" and has_base(known, ours)

    @property
    def adds_nothing(self) -> bool:
        """Whether there is nothing but a base, with a method that gives it back then."""
        known = MERGEKIT_METHODS.get(str(self.kind))
        is_alone = self.base is not None and self.paths == [self.base]
        return known is not None and known.may_add_nothing and is_alone

    def as_it_is(self) -> "Group":
        """The base alone, which keeps its values."""
        return replace(self, kind="passthrough", sources=[(str(self.base), {})], scopes=())


def has_base(known: MergekitMethod, ours: type[Method]) -> bool:
    """Whether a method of ours has a base where mergekit's is given one."""
    return known.base == "optional" or ours.needs_base
