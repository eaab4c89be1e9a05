"""A study: what a suite finds out, the steps it takes, and its part of results.json."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from matsmerge.lab.experiments.step import Step
from matsmerge.lab.experiments.store import Record
from matsmerge.lab.experiments.suite_parts import SuitePart
from matsmerge.lab.experiments.suite_setup import Setup

if TYPE_CHECKING:
    from matsmerge.lab.experiments.suite import Suite

Names = tuple[str, Iterable[str], Iterable[str]]  # where they are, names, and those there are


@dataclass(frozen=True)
class Asked:
    """Steps whose outcome is part of the results, and what makes results of their records."""

    steps: Sequence[Step[Any]]
    results: Callable[..., Iterable[Any]]

    @classmethod
    def of(
        cls, step: Step[Any], result: Callable[..., Any], *others: Step[Any], **about: Any
    ) -> "Asked":
        """One result, made of what the step and others found and of what they are about."""

        def results(*records: Record) -> list[Any]:
            return [result(*(record.found for record in records), **about)]

        return cls((step, *others), results)


class Study(SuitePart):
    """A study as a suite's file describes it: for which variants and seeds; None: all.

    Its results are in the field of `VariantResults` that has the study's name.
    """

    variants: list[str] | None = None
    seeds: list[int] | None = None

    of_one_seed: ClassVar[bool] = False  # a picture, not numbers to average

    def names(self, _: "Suite", /) -> Iterable[Names]:
        """Names of other parts of the suite that the study uses."""
        return ()

    def is_for(self, setup: Setup) -> bool:
        return (self.variants is None or setup.variant_name in self.variants) and (
            self.seeds is None or setup.seed in self.seeds
        )

    @abstractmethod
    def ask(self, setup: Setup) -> Iterator[Asked]:
        """The steps for one variant and seed."""
