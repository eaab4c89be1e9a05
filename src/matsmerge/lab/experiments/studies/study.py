"""A study: what a suite finds out, the steps it takes, and its part of results.json."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from matsmerge.lab.experiments.step import Step
from matsmerge.lab.experiments.store import Store
from matsmerge.lab.experiments.suite_parts import Part
from matsmerge.lab.experiments.suite_setup import Setup

if TYPE_CHECKING:
    from matsmerge.lab.experiments.suite import Suite

Names = tuple[str, Iterable[str], Iterable[str]]  # where they are, names, and those there are


@dataclass(frozen=True)
class Asked:
    """A step whose outcome is part of the results, and what makes results of it.

    `results` is called when the step is done, and so are all that it needs.
    """

    step: Step[Any]
    results: Callable[[Store], Iterable[Any]]

    @classmethod
    def of(
        cls, step: Step[Any], result: Callable[..., Any], *others: Step[Any], **about: Any
    ) -> "Asked":
        """One result, made of what the step and others found and of what they are about."""
        steps = (step, *others)
        return cls(step, lambda store: [result(*map(store.found, steps), **about)])


class Study(Part):
    """A study as a suite's file describes it: for which variants and seeds; None: all.

    Its results are in the field of `VariantResults` that has the study's name.
    """

    variants: list[str] | None = None
    seeds: list[int] | None = None

    of_one_seed: ClassVar[bool] = False  # a picture, not numbers to average

    def names(self, suite: "Suite") -> Iterator[Names]:
        """Names of other parts of the suite that the study uses."""
        yield "variants", self.variants or (), suite.variants
        yield "seeds", map(str, self.seeds or ()), map(str, suite.seeds)

    def is_for(self, setup: Setup) -> bool:
        return (self.variants is None or setup.variant_name in self.variants) and (
            self.seeds is None or setup.seed in self.seeds
        )

    def ask(self, setup: Setup) -> Iterator[Asked]:
        """The steps for one variant and seed."""
        raise NotImplementedError
