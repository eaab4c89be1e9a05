"""`mats cost`."""

import shlex
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matsmerge.byte_sizes import format_bytes
from matsmerge.cli.display import JsonScreen
from matsmerge.cli.field_options import CommandOptions, argument, option, takes_options
from matsmerge.errors import RecipeError
from matsmerge.limits import MOST_COUNTED, MOST_ITERATIONS

if TYPE_CHECKING:
    from matsmerge.recipes.recipe import Recipe


class Costs(CommandOptions):
    """Of what the costs are."""

    recipe: Path | None = argument(None, metavar="RECIPE")
    """A recipe file: its models and method."""

    model: str | None = option(metavar="MODEL")
    """Instead of a recipe: a model or adapter like those."""

    num_models: int | None = option(ge=1, le=MOST_COUNTED)
    """How many are merged. Default: the recipe's, or 8."""

    num_examples: int = option(1000, ge=1, le=MOST_COUNTED)
    """Examples of each model's statistics."""

    tokens_per_example: float = option(138.5, ge=0, le=MOST_COUNTED)
    """Tokens of an example; the paper's tasks have 138.5."""

    iterations: int = option(100, ge=1, le=MOST_ITERATIONS)
    """Of conjugate gradients."""

    training_batches: int = option(2000, ge=0, le=MOST_COUNTED)
    """Batches of 1,024 for multitask training, to compare with."""

    measure: bool = False
    """Also run the recipe's merge: operations by torch's counter, seconds, memory."""


@takes_options
def cost(asked: Costs, screen: JsonScreen) -> None:
    """What merging takes by the paper's formulas, and what a merge really took.

    mats cost recipe.yaml --measure

    mats cost --model t5-large --num-models 8
    """
    from matsmerge.checkpoints.source import open_checkpoint
    from matsmerge.lab.costs.cost_formulas import Setting, training
    from matsmerge.lab.costs.model_shape import shape_of

    recipe = asked.recipe
    described = _read(asked)
    source = asked.model if described is None else described.models[0].model
    shape = shape_of(open_checkpoint(str(source)))
    num_models = asked.num_models or (8 if described is None else len(described.models))
    num_tokens = round(asked.num_examples * asked.tokens_per_example)
    setting = Setting(shape, num_models, asked.num_examples, num_tokens, asked.iterations)
    costs = {name: formula(setting) for name, formula in setting.formulas.items()}
    trained = training(shape.num_run, asked.training_batches * 1024 * asked.tokens_per_example)
    measured = _measure(recipe, described) if asked.measure and recipe and described else None
    content = {
        "setting": {
            "num_models": num_models,
            "num_parameters": shape.num_parameters,
            "num_layers": len(shape.layers),
            "num_examples": asked.num_examples,
            "num_tokens": num_tokens,
            "num_iterations": asked.iterations,
        },
        "operations": {name: asdict(c) | {"total": c.total} for name, c in costs.items()},
        "multitask_training": trained,
        "measured": measured,
    }
    screen.result(content)
    rows = [
        (name, f"{c.statistics:.1e}" if c.statistics else "", f"{c.merging:.1e}", f"{c.total:.1e}")
        for name, c in costs.items()
    ]
    rows.append(("multitask training", "", "", f"{trained:.1e}"))
    screen.table(("operations, by formula", "statistics", "merging", "total"), rows)
    screen.say(
        f"{num_models} models of {shape.num_parameters:,} parameters, {len(shape.layers)} layers; "
        f"{asked.num_examples:,} examples of statistics with {num_tokens:,} tokens for each; "
        f"{asked.iterations} iterations"
    )
    dearest = max(costs, key=lambda name: costs[name].total)
    if trained:
        share = costs[dearest].total / trained
        screen.say(f"the dearest, {dearest}, takes {share:.2%} of what training on all tasks does")
    if measured is not None and described is not None:
        screen.say(
            f"measured, {described.method.name}: {measured['operations']:.1e} operations of matrix "
            f"products and decompositions, {measured['seconds']:.1f} s, peak memory of a process "
            f"{format_bytes(measured['peak_bytes'])} (all of `mats merge`, without statistics)"
        )
    if recipe is None:
        screen.next("mats init MODEL... --base BASE", "writes a recipe to merge by")
    else:
        screen.next(f"mats merge {shlex.quote(str(recipe))} --out merged")


def _read(asked: Costs) -> "Recipe | None":
    from matsmerge.recipes.recipe_file import read_recipe

    if (asked.recipe is None) == (asked.model is None):
        raise RecipeError("give either a recipe file, or --model with a model like those to merge")
    if asked.recipe is not None:
        return read_recipe(asked.recipe)[0]
    if asked.measure:
        raise RecipeError("--measure runs a merge, for which it needs a recipe file")
    return None


def _measure(recipe: Path, described: "Recipe") -> dict[str, Any]:
    from matsmerge.engine.executor import SerialExecutor
    from matsmerge.engine.merge_run import RunOptions, merge_in_memory
    from matsmerge.engine.prepared_merge import prepare_merge
    from matsmerge.lab.costs.run_cost import count_operations, measure_command

    prepared = prepare_merge(described)
    options = RunOptions(SerialExecutor())
    operations = count_operations(lambda: merge_in_memory(prepared, options))
    with tempfile.TemporaryDirectory() as folder:
        found = measure_command(["merge", str(recipe), "--out", f"{folder}/merged", "--quiet"])
    return {"operations": operations, **asdict(found)}
