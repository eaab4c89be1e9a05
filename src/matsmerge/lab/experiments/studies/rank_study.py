"""Score against the rank of second moments, and against the size of their files."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from matsmerge.checkpoints.safetensors_header import read_header
from matsmerge.lab.experiments.step import Places, Step
from matsmerge.lab.experiments.studies.study import Asked, Names, Study
from matsmerge.lab.experiments.suite_results import RankScore, ScoredModel
from matsmerge.lab.experiments.suite_setup import Setup
from matsmerge.limits import MOST_RANK
from matsmerge.statistics.compression import compress_statistics
from matsmerge.statistics.kinds import arrays_of
from matsmerge.statistics.statistics_file import open_statistics, save_statistics

if TYPE_CHECKING:
    from matsmerge.lab.experiments.suite import Suite


@dataclass(frozen=True, kw_only=True)
class Compress(Step[None], kind="compress", output="statistics.safetensors"):
    """Statistics whose second moments are kept by a rank."""

    statistics: Step[Any]  # that have whole ones
    rank: int

    def run(self, places: Places, out: Path, /) -> None:
        whole = open_statistics(places.path(self.statistics))
        save_statistics(compress_statistics(whole, self.rank), out / self.output)


@dataclass(frozen=True, kw_only=True)
class Weigh(Step[int], kind="weigh"):
    """The bytes that statistics of some kinds take in all files together."""

    statistics: list[Step[Any]]
    kinds: list[str]

    def run(self, places: Places, _: Path, /) -> int:
        arrays = arrays_of(self.kinds)
        return sum(
            spec.num_bytes
            for step in self.statistics
            for name, spec in read_header(places.path(step)).specs.items()
            if name.split("/")[1] in arrays
        )


class RankStudy(Study):
    """Methods with second moments kept by a rank, tuned as those with whole ones."""

    methods: list[str] = Field(default=["mats_kfac"])  # of the suite's
    ranks: list[Annotated[int, Field(ge=1, le=MOST_RANK)]] = Field(default=[4, 8, 16, 32, 64, 128])

    def names(self, suite: "Suite", /) -> Iterator[Names]:
        yield "methods", self.methods, suite.methods

    def ask(self, setup: Setup) -> Iterator[Asked]:
        for name in self.methods:
            if name in setup.methods:
                yield from self._ask(name, setup)

    def _ask(self, name: str, setup: Setup) -> Iterator[Asked]:
        whole = setup.compared(name)
        kinds = setup.methods[name].parsed().needed_statistics
        for rank in (*self.ranks, None):
            merge = whole
            if rank is not None:
                statistics = {
                    task: Compress(
                        name=f"compress {setup.name} {task} {rank}", statistics=step, rank=rank
                    )
                    for task, step in whole.merging.statistics.items()
                }
                merging = replace(whole.merging, statistics=statistics)
                title = f"{whole.name} rank {rank}"
                merge = replace(whole, name=title, merging=merging, keep_model=False)
            used = list(merge.merging.statistics.values())
            weigh = Weigh(name=f"weigh {merge.name}", statistics=used, kinds=kinds)
            yield Asked.of(merge, _score, weigh, method=name, rank=rank, seed=setup.seed)


def _score(found: ScoredModel, num_bytes: int, **about: Any) -> RankScore:
    return RankScore(**about, score=found.test.mean, num_bytes=num_bytes)
