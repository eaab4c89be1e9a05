"""What merging takes: operations by the paper's formulas, seconds by the clock."""

import shutil
import time
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.companions import read_json
from matsmerge.checkpoints.opening import open_checkpoint
from matsmerge.costs.formulas import FORMULAS, VECTOR_FORMULAS, Setting, training
from matsmerge.costs.model_shape import shape_of
from matsmerge.engine.executor import SerialExecutor
from matsmerge.engine.merging import merge_to_folder
from matsmerge.engine.preparing import prepare
from matsmerge.errors import RecipeError
from matsmerge.experiments.inputs import Needs, Settings
from matsmerge.recipes.reading import read_recipe
from matsmerge.statistics.statistics import MAIN
from matsmerge.statistics.statistics_file import open_statistics


def measure_costs(settings: Settings, needs: Needs, out: Path) -> dict[str, Any]:
    """Every method's chosen recipe, merged again a few times."""
    costs = []
    for name in settings["methods"]:
        recipe = read_recipe(needs[f"merge:{name}"] / "recipe.yaml")[0]
        seconds = []
        for _ in range(settings["repeats"]):
            shutil.rmtree(out / "merged", ignore_errors=True)
            prepared = prepare(recipe)
            begin = time.perf_counter()
            merge_to_folder(prepared, out / "merged", executor=SerialExecutor())
            seconds.append(round(time.perf_counter() - begin, 3))
        shutil.rmtree(out / "merged")
        iterations = recipe.method.parameters.get("iterations", 100)
        costs.append({"method": name, "seconds": seconds, "iterations": iterations})
    model = shape_of(open_checkpoint(recipe.models[0].model))
    num_examples, num_tokens = _examples(settings, needs)
    formulas = VECTOR_FORMULAS if model.are_vectors else FORMULAS
    for cost in costs:
        kind = settings["methods"][cost["method"]]
        setting = Setting(
            len(recipe.models), model.num_parameters, model.layers, num_examples, num_tokens,
            cost.pop("iterations"), model.num_run,
        )  # fmt: skip
        cost["operations"] = formulas[kind](setting).total if kind in formulas else None
    if "joint" in needs:
        manifest = read_json(needs["joint"] / "model" / "training.json")
        options = manifest["options"]
        examples = manifest["num_steps"] * options["batch_size"] * options["accumulate"]
        operations = training(model.num_run, examples * num_tokens / num_examples)
        costs.append({"method": "joint", "seconds": [], "operations": operations})
    return {"costs": costs}


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
