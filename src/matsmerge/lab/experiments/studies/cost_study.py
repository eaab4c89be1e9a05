"""What merging takes: operations by the paper's formulas, seconds by the clock."""

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.engine.executor import SerialExecutor
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.prepared_merge import prepare_merge
from matsmerge.errors import DataError, RecipeError
from matsmerge.files.guarded_files import read_json
from matsmerge.files.strict_yaml import read_yaml
from matsmerge.lab.costs.cost_formulas import Setting, training
from matsmerge.lab.costs.model_shape import shape_of
from matsmerge.lab.experiments.step import Places, Step
from matsmerge.lab.experiments.steps import Collect, Merge, Merging, Train
from matsmerge.lab.experiments.store import Record
from matsmerge.lab.experiments.studies.study import Asked, Study
from matsmerge.lab.experiments.suite_parts import MethodOfSuite
from matsmerge.lab.experiments.suite_results import JOINT, MergeCost
from matsmerge.lab.experiments.suite_setup import Setup
from matsmerge.limits import MOST_KEPT
from matsmerge.methods import METHODS
from matsmerge.recipes.recipe import Recipe, make_recipe
from matsmerge.statistics.statistics import MAIN
from matsmerge.statistics.statistics_file import open_statistics

_DEFAULT_LENGTH = 138  # tokens of an example in the paper's tasks


@dataclass(frozen=True, kw_only=True)
class Measure(Step[list[MergeCost]], kind="costs", runs_alone=True):
    """Every method as it was chosen, merged again a few times."""

    merging: Merging
    methods: Mapping[str, Merge]
    joint: Train | None
    repeats: int
    length: float  # tokens of an example, where statistics have not counted them

    def run(self, places: Places, out: Path, /) -> list[MergeCost]:
        costs = []
        plain = self.merging.recipe(places)
        model = shape_of(open_checkpoint(plain["models"][0]["model"]))
        num_examples, num_tokens = self._examples(places)
        setting = Setting(model, len(plain["models"]), num_examples, num_tokens)
        for name, merge in self.methods.items():
            chosen = read_yaml(places.path(merge), RecipeError)["method"]
            recipe = make_recipe({**plain, "method": chosen})
            seconds = []
            for _ in range(self.repeats):
                prepared = prepare_merge(recipe)
                begin = time.perf_counter()
                options = RunOptions(SerialExecutor(), overwrite=True)
                merge_to_folder(prepared, out / "merged", options)
                seconds.append(round(time.perf_counter() - begin, 3))
            shutil.rmtree(out / "merged")
            operations = _operations(recipe, setting)
            costs.append(MergeCost(method=name, seconds=seconds, operations=operations))
        if self.joint is not None:
            trained = read_json(places.path(self.joint) / "training.json", DataError)
            options = trained["options"]
            seen = trained["num_steps"] * options["batch_size"] * options["accumulate"]
            operations = training(model.num_run, seen * num_tokens / num_examples)
            costs.append(MergeCost(method=JOINT, operations=operations))
        return costs

    def _examples(self, places: Places) -> tuple[int, int]:
        """Examples and tokens of one model's statistics, averaged over models."""
        num_examples, num_tokens = 0, 0.0
        for step in self.merging.statistics.values():
            found = open_statistics(places.path(step)).header.sets[MAIN]
            tokens = max(found.num_rows.values(), default=0)
            num_examples += found.num_examples
            num_tokens += tokens or found.num_examples * self.length
        num = len(self.merging.statistics)
        return round(num_examples / num), round(num_tokens / num)


class CostStudy(Study):
    """The costs of all methods, and of joint training."""

    repeats: int = Field(default=3, ge=1, le=MOST_KEPT)

    def ask(self, setup: Setup) -> Iterator[Asked]:
        lengths = [task.max_length or _DEFAULT_LENGTH for task in setup.suite.tasks.values()]
        step = Measure(
            name=f"costs {setup.name}",
            merging=setup.merging(MethodOfSuite(method="average"), with_statistics=True),
            methods={name: setup.compared(name) for name in setup.methods},
            joint=setup.joint(),
            repeats=self.repeats,
            length=sum(lengths) / len(lengths),
        )
        needed: list[Step[Any]] = [*step.merging.statistics.values()]
        if step.joint is not None:
            needed.append(step.joint)
        yield Asked([step, *needed], partial(_costs, step))


def _costs(step: Measure, measured: Record, *needed: Record) -> Iterator[MergeCost]:
    """The costs with the seconds that other steps took: joint training and statistics."""
    collecting = [record.seconds for record in needed if record.kind == Collect.kind]
    joint = [record.seconds for record in needed if record.kind == Train.kind]
    for cost in measured.found:
        if cost.method == JOINT:
            yield cost.model_copy(update={"seconds": joint})
        elif step.methods[cost.method].merging.statistics:
            yield cost.model_copy(update={"statistics_seconds": sum(collecting)})
        else:
            yield cost


def _operations(recipe: Recipe, setting: Setting) -> float | None:
    """By the formula of the method's name; None if there is none for what the method does."""
    formula = setting.formulas.get(recipe.method.name)
    method = recipe.method.at_depth(0)
    if formula is None:
        return None
    own, usual = (getattr(m, "objective", None) for m in (method, METHODS[recipe.method.name]()))
    if getattr(method, "stages", None) or type(own) is not type(usual):
        return None
    iterations = getattr(getattr(method, "solver", None), "iterations", None)
    if iterations is not None:
        setting = replace(setting, num_iterations=iterations)
    return formula(setting).total
