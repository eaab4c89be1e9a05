"""Score and error against the number of iterations."""

import shutil
import statistics
from pathlib import Path
from typing import Any

from matsmerge.engine.executor import SerialExecutor
from matsmerge.engine.merge_file import read_merge_file
from matsmerge.engine.merging import merge_to_folder
from matsmerge.engine.preparing import prepare
from matsmerge.experiments.inputs import Needs, Settings, read_tasks, recipe_of
from matsmerge.recipes.recipe import make_recipe
from matsmerge.tasks.kept_base import KeptBase
from matsmerge.tuning.scoring import Scorer, read_validation_tasks


def follow(settings: Settings, needs: Needs, out: Path) -> dict[str, Any]:
    """One run of a solver, scored on validation data on the way."""
    iterations = settings["iterations"]
    recipe = {**recipe_of(settings, needs), "trajectory": iterations}
    folder = out / "merged"
    shutil.rmtree(folder, ignore_errors=True)
    merge_to_folder(prepare(make_recipe(recipe)), folder, executor=SerialExecutor(), overwrite=True)
    tasks = read_validation_tasks(read_tasks(settings, needs), "validation")
    scorer = Scorer(tasks, settings["num_validation"], settings["batch_size"], KeptBase())
    points = []
    for at in iterations:
        step = folder / f"iteration-{at}"
        scores, _ = scorer.score(step)
        points.append(
            {
                "iterations": at,
                "score": sum(scores.values()) / len(scores),
                **errors_at(read_merge_file(step / "merge.json"), at),
            }
        )
    shutil.rmtree(folder)
    return {"points": points}


def errors_at(manifest: dict[str, Any], iteration: int) -> dict[str, float]:
    """Of all layers that were solved: the median of what is left of the start's error."""
    residuals: list[float] = []
    objectives: list[float] = []
    for parameter in manifest["parameters"].values():
        for report in parameter.get("solved", ())[-1:]:
            for key, values in (("residuals", residuals), ("objective_values", objectives)):
                trace = report.get(key) or [1.0]
                # A layer that has stopped stays where it is.
                reached = trace[min(iteration, len(trace) - 1)]
                values.append(reached / trace[0] if trace[0] else 0.0)
    return {
        "residual": statistics.median(residuals) if residuals else 0.0,
        "objective": statistics.median(objectives) if objectives else 0.0,
    }
