"""Score and error against the number of iterations of a solver."""

import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from matsmerge.engine.executor import SerialExecutor
from matsmerge.engine.merge_file import read_merge_file
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.prepared_merge import prepare_merge
from matsmerge.lab.experiments.step import Places, Step, TaskInput
from matsmerge.lab.experiments.steps import Merging, Scoring
from matsmerge.lab.experiments.studies.study import Asked, Names, Study
from matsmerge.lab.experiments.suite_parts import MethodOfSuite, name_of
from matsmerge.lab.experiments.suite_results import Curve, CurvePoint
from matsmerge.lab.experiments.suite_setup import Setup
from matsmerge.lab.tuning.trial_score import LabelScorer, read_validation_tasks
from matsmerge.limits import MOST_KEPT
from matsmerge.methods import METHODS
from matsmerge.recipes.recipe import make_recipe

if TYPE_CHECKING:
    from matsmerge.lab.experiments.suite import Suite


@dataclass(frozen=True, kw_only=True)
class Follow(Step[list[CurvePoint]], kind="follow"):
    """One run of a solver, scored on validation data on the way."""

    merging: Merging
    tasks: list[TaskInput]
    scoring: Scoring
    iterations: list[int]

    def run(self, places: Places, out: Path, /) -> list[CurvePoint]:
        recipe = make_recipe({**self.merging.recipe(places), "trajectory": self.iterations})
        folder = out / "merged"
        shutil.rmtree(folder, ignore_errors=True)
        merge_to_folder(prepare_merge(recipe), folder, RunOptions(SerialExecutor(), overwrite=True))
        tasks = read_validation_tasks([task.read(places) for task in self.tasks], "validation")
        scorer = LabelScorer(
            tasks=tasks,
            num_examples=self.scoring.num_validation,
            batch_size=self.scoring.batch_size,
        )
        points = []
        for at in self.iterations:
            step = folder / f"iteration-{at}"
            scores, _ = scorer.score(step)
            residual, objective = _errors_at(read_merge_file(step / "merge.json"), at)
            mean = sum(scores.values()) / len(scores)
            points.append(
                CurvePoint(iterations=at, score=mean, residual=residual, objective=objective)
            )
        shutil.rmtree(folder)
        return points


class CurveStudy(Study):
    """Methods by the names of their curves."""

    curves: dict[str, str | dict[str, Any]]
    iterations: list[int] = Field(max_length=MOST_KEPT)

    def names(self, _: "Suite", /) -> Iterator[Names]:
        yield "curves", map(name_of, self.curves.values()), METHODS

    def ask(self, setup: Setup) -> Iterator[Asked]:
        for name, method in self.curves.items():
            step = Follow(
                name=f"follow {setup.name} {name}",
                merging=setup.merging(MethodOfSuite(method=method)),
                tasks=setup.tasks(),
                scoring=setup.scoring,
                iterations=self.iterations,
            )
            yield Asked.of(step, _curve, name=name, seed=setup.seed)


def _curve(found: list[CurvePoint], **about: Any) -> Curve:
    return Curve(**about, points=found)


def _errors_at(manifest: dict[str, Any], iteration: int) -> tuple[float, float]:
    """What is left of the start's residual and objective: the medians over the solved layers."""
    left: dict[str, list[float]] = {"residuals": [], "objective_values": []}
    for parameter in manifest["parameters"].values():
        for report in parameter.get("solved", ())[-1:]:
            for key, values in left.items():
                trace = report.get(key) or [1.0]
                # A layer that has stopped stays where it is.
                reached = trace[min(iteration, len(trace) - 1)]
                values.append(reached / trace[0] if trace[0] else 0.0)
    residual, objective = (statistics.median(v) if v else 0.0 for v in left.values())
    return residual, objective
