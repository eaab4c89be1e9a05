"""How far the tasks' subspaces of inputs overlap."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from matsmerge.lab.experiments.step import Places, Step
from matsmerge.lab.experiments.steps import Collect
from matsmerge.lab.experiments.studies.study import Asked, Study
from matsmerge.lab.experiments.suite_results import Subspaces
from matsmerge.lab.experiments.suite_setup import Setup
from matsmerge.lab.subspaces.subspace_findings import DEFAULT_ENERGY, SubspaceSize
from matsmerge.lab.subspaces.subspace_view import SubspaceTask, prepare_view
from matsmerge.statistics.statistics_file import open_statistics


@dataclass(frozen=True, kw_only=True)
class Compare(Step[Subspaces], kind="subspaces"):
    """The overlaps of all pairs of tasks, and of each layer."""

    statistics: Mapping[str, Collect]
    energy: float = DEFAULT_ENERGY

    def run(self, places: Places, _: Path, /) -> Subspaces:
        tasks = [
            SubspaceTask(n, open_statistics(places.path(s))) for n, s in self.statistics.items()
        ]
        view = prepare_view(tasks, size=SubspaceSize(None, self.energy)).run()
        layers = [
            {"name": layer.name, "mean_overlap": layer.mean_overlap, "dim": layer.dim}
            for layer in view.layers
        ]
        return {**view.summary(), "layers": layers}


class SubspaceStudy(Study):
    """The study has no options."""

    of_one_seed: ClassVar[bool] = True

    def ask(self, setup: Setup) -> Iterator[Asked]:
        statistics = {task: setup.statistics(task) for task in setup.suite.tasks}
        step = Compare(name=f"subspaces {setup.name}", statistics=statistics)
        yield Asked.of(step, lambda found: found)
