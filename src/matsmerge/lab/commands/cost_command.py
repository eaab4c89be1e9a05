"""`mats cost`."""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matsmerge.cli import display
from matsmerge.cli.shared_options import AsJson
from matsmerge.errors import RecipeError
from matsmerge.limits import MOST_COUNTED, MOST_ITERATIONS

if TYPE_CHECKING:
    from matsmerge.lab.costs.cost_formulas import Setting
    from matsmerge.recipes.recipe import Recipe


def cost(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="A recipe file: its models and method.", metavar="RECIPE"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Instead of a recipe: a model or adapter like those."),
    ] = None,
    num_models: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_COUNTED, help="How many are merged. Default: the recipe's, or 8."
        ),
    ] = None,
    num_examples: Annotated[
        int, typer.Option(min=1, max=MOST_COUNTED, help="Examples of each model's statistics.")
    ] = 1000,
    tokens_per_example: Annotated[
        float,
        typer.Option(
            min=0, max=MOST_COUNTED, help="Tokens of an example; the paper's tasks have 138.5."
        ),
    ] = 138.5,
    iterations: Annotated[
        int, typer.Option(min=1, max=MOST_ITERATIONS, help="Of conjugate gradients.")
    ] = 100,
    training_batches: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_COUNTED,
            help="Batches of 1,024 for multitask training, to compare with.",
        ),
    ] = 2000,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Also run the recipe's merge: operations by torch's counter, seconds, memory.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What merging takes by the paper's formulas, and what a merge really took.

    mats cost recipe.yaml --measure

    mats cost --model t5-large --num-models 8
    """
    from matsmerge.checkpoints.source import open_checkpoint
    from matsmerge.lab.costs.cost_formulas import Setting, training
    from matsmerge.lab.costs.model_shape import shape_of

    described = _read(recipe, model, measure=measure)
    source = model if described is None else described.models[0].model
    shape = shape_of(open_checkpoint(str(source)))
    count = num_models or (8 if described is None else len(described.models))
    num_tokens = round(num_examples * tokens_per_example)
    setting = Setting(shape, count, num_examples, num_tokens, iterations)
    costs = {name: formula(setting) for name, formula in setting.formulas.items()}
    trained = training(shape.num_run, training_batches * 1024 * tokens_per_example)
    measured = _measure(recipe, described) if measure and recipe and described else None
    if as_json:
        content = {
            "setting": {
                "num_models": count,
                "num_parameters": shape.num_parameters,
                "num_layers": len(shape.layers),
                "num_examples": num_examples,
                "num_tokens": setting.num_tokens,
                "num_iterations": iterations,
            },
            "operations": {
                name: {"statistics": c.statistics, "merging": c.merging, "total": c.total}
                for name, c in costs.items()
            },
            "multitask_training": trained,
            "measured": measured,
        }
        print(json.dumps(content, indent=2))
        return
    _show(setting, costs, trained, measured, described)


def _read(recipe: Path | None, model: str | None, *, measure: bool) -> "Recipe | None":
    from matsmerge.recipes.recipe_file import read_recipe

    if (recipe is None) == (model is None):
        raise RecipeError("give either a recipe file, or --model with a model like those to merge")
    if recipe is None:
        if measure:
            raise RecipeError("--measure runs a merge, for which it needs a recipe file")
        return None
    return read_recipe(recipe)[0]


def _measure(recipe: Path, described: "Recipe") -> dict[str, Any]:
    from matsmerge.engine.executor import SerialExecutor
    from matsmerge.engine.merge_run import merge_in_memory
    from matsmerge.engine.prepared_merge import prepare
    from matsmerge.lab.costs.run_cost import count_operations, measure_command

    prepared = prepare(described)
    operations = count_operations(lambda: merge_in_memory(prepared, executor=SerialExecutor()))
    with tempfile.TemporaryDirectory() as folder:
        found = measure_command(["merge", str(recipe), "--out", f"{folder}/merged", "--quiet"])
    return {
        "operations": operations,
        "seconds": found.seconds,
        "peak_bytes": found.peak_bytes,
    }


def _show(
    setting: "Setting",
    costs: dict[str, Any],
    trained: float,
    measured: dict[str, Any] | None,
    described: "Recipe | None",
) -> None:
    from matsmerge.byte_sizes import format_bytes

    rows = [
        (name, f"{c.statistics:.1e}" if c.statistics else "", f"{c.merging:.1e}", f"{c.total:.1e}")
        for name, c in costs.items()
    ]
    rows.append(("multitask training", "", "", f"{trained:.1e}"))
    display.show_table(("operations, by formula", "statistics", "merging", "total"), rows)
    display.stdout.print(
        f"{setting.num_models} models of {setting.num_parameters:,} parameters, "
        f"{len(setting.layers)} layers; {setting.num_examples:,} examples of statistics with "
        f"{setting.num_tokens:,} tokens for each; {setting.num_iterations} iterations",
        soft_wrap=True,
    )
    if measured is not None and described is not None:
        display.stdout.print(
            f"measured, {described.method.name}: {measured['operations']:.1e} operations of matrix "
            f"products and decompositions, {measured['seconds']:.1f} s, peak memory of a process "
            f"{format_bytes(measured['peak_bytes'])} (all of `mats merge`, without statistics)",
            soft_wrap=True,
        )
