"""What merging takes: operations by the paper's formulas, seconds by the clock."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.opening import open_checkpoint
from matsmerge.costs.formulas import FORMULAS, VECTOR_FORMULAS, Setting, training
from matsmerge.costs.model_shape import shape_of
from matsmerge.engine.executor import SerialExecutor
from matsmerge.engine.merging import merge_to_folder
from matsmerge.engine.preparing import prepare
from matsmerge.errors import DataError, RecipeError
from matsmerge.experiments.inputs import Needs, Settings, recipe_of
from matsmerge.guarded_files import Content, Count, read_json_as
from matsmerge.methods.mats import Mats
from matsmerge.recipes.recipe import Recipe, make_recipe
from matsmerge.statistics.statistics import MAIN
from matsmerge.statistics.statistics_file import open_statistics
from matsmerge.strict_yaml import read_yaml


class _TrainingOptions(Content):
    batch_size: Count
    accumulate: Count


class _Trained(Content):
    """Of a training.json how many examples were seen."""

    num_steps: Count
    options: _TrainingOptions


def measure_costs(settings: Settings, needs: Needs, out: Path) -> dict[str, Any]:
    """Every method as it was chosen, merged again a few times."""
    costs = []
    model = shape_of(open_checkpoint(recipe_of(settings, needs)["models"][0]["model"]))
    num_examples, num_tokens = _examples(settings, needs)
    for name in settings["methods"]:
        chosen = read_yaml(needs[f"merge:{name}"] / "recipe.yaml", RecipeError)["method"]
        recipe = make_recipe({**recipe_of(settings, needs), "method": chosen})
        seconds = []
        for _ in range(settings["repeats"]):
            prepared = prepare(recipe)
            begin = time.perf_counter()
            merge_to_folder(prepared, out / "merged", executor=SerialExecutor(), overwrite=True)
            seconds.append(round(time.perf_counter() - begin, 3))
        shutil.rmtree(out / "merged")
        setting = Setting(
            len(recipe.models), model.num_parameters, model.layers, num_examples, num_tokens,
            num_run=model.num_run,
        )  # fmt: skip
        operations = _operations(recipe, setting, are_vectors=model.are_vectors)
        costs.append({"method": name, "seconds": seconds, "operations": operations})
    if "joint" in needs:
        trained = read_json_as(needs["joint"] / "model" / "training.json", _Trained, DataError)
        options = trained.options
        examples = trained.num_steps * options.batch_size * options.accumulate
        operations = training(model.num_run, examples * num_tokens / num_examples)
        costs.append({"method": "joint", "seconds": [], "operations": operations})
    return {"costs": costs}


def _operations(recipe: Recipe, setting: Setting, *, are_vectors: bool) -> float | None:
    """By the formula of the method's name; None if there is none for what the method does."""
    formula = (VECTOR_FORMULAS if are_vectors else FORMULAS).get(recipe.method.name)
    method = recipe.method.at_depth(0)
    if formula is None:
        return None
    if isinstance(method, Mats):
        default = type(method)()
        if method.stages or type(method.objective) is not type(default.objective):
            return None
        iterations = getattr(method.solver, "iterations", None)
        if iterations is not None:
            setting = replace(setting, num_iterations=iterations)
    return formula(setting).total


def _examples(settings: Settings, needs: Needs) -> tuple[int, int]:
    """Examples and tokens of one model's statistics, averaged over models."""
    counts = []
    for name, folder in needs.items():
        if name.startswith("statistics:"):
            found = open_statistics(folder / "statistics.safetensors").header.sets[MAIN]
            tokens = max(found.num_rows.values(), default=0)
            counts.append((found.num_examples, tokens or found.num_examples * settings["length"]))
    if not counts:
        raise RecipeError("costs: no method of the suite has statistics; leave the study out")
    return tuple(round(sum(c) / len(counts)) for c in zip(*counts, strict=True))  # type: ignore[return-value]
