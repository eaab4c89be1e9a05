"""`mats merge`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matsmerge.cli import display
from matsmerge.errors import RecipeError

if TYPE_CHECKING:
    from matsmerge.engine.executor import LocalExecutor
    from matsmerge.engine.merging import PreparedMerge
    from matsmerge.recipes.recipe import Recipe

_WITHOUT_FILE = "Without a recipe file"
_RUNNING = "Running"


def merge(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="A recipe file (YAML), ours or mergekit's.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write the merged model to.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL",
            help="A model: file, folder, or hub id with an optional @revision. Repeat for each.",
            rich_help_panel=_WITHOUT_FILE,
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model they were fine-tuned from.",
            rich_help_panel=_WITHOUT_FILE,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="average, task_arithmetic, ties, dare_linear, dare_ties, slerp, model_stock.",
            rich_help_panel=_WITHOUT_FILE,
        ),
    ] = None,
    weight: Annotated[
        list[float] | None,
        typer.Option(
            metavar="NUMBER",
            help="How much a model counts, in the order of the models. Repeat for each.",
            rich_help_panel=_WITHOUT_FILE,
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="Factor on the task vectors (task_arithmetic, ties, dare_*).",
            rich_help_panel=_WITHOUT_FILE,
        ),
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(
            help="Share of each task vector to keep (ties, dare_*).",
            rich_help_panel=_WITHOUT_FILE,
        ),
    ] = None,
    trim: Annotated[
        str | None,
        typer.Option(
            help="Rank entries globally or within each parameter: global, parameter (ties).",
            rich_help_panel=_WITHOUT_FILE,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the random choice (dare_*).", rich_help_panel=_WITHOUT_FILE),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Pattern of parameters that belong to one task alone, e.g. 'classifier.*': kept "
            "per model in heads/, not merged. Repeatable; adds to the recipe's.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Dtype of the output: float32, bfloat16, float16, float64. Default: the inputs'.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the plan, write nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier merge in the output folder.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a merge that was interrupted.")
    ] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Go on where an input holds NaN or Inf.")
    ] = False,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory to use beyond the interpreter's own, e.g. 2GB. Default: half of what is "
            "free.",
            rich_help_panel=_RUNNING,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Jobs at once. Default: all cores.", rich_help_panel=_RUNNING),
    ] = None,
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest file to write.", rich_help_panel=_RUNNING)
    ] = "5GB",
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show errors only.", rich_help_panel=_RUNNING)
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_RUNNING),
    ] = False,
) -> None:
    """Merge models into one.

    Either from a recipe file:

        mats merge recipe.yaml --out merged

    or from options alone:

        mats merge --method task_arithmetic --scale 0.3 --base B --model A --model C --out merged
    """
    from matsmerge.checkpoints.opening import local_path
    from matsmerge.engine.executor import LocalExecutor
    from matsmerge.engine.machine import keep_freed_memory, parse_bytes
    from matsmerge.engine.merging import merge_to_folder, prepare
    from matsmerge.engine.output_folder import check_target

    parameters = {"scale": scale, "density": density, "trim": trim, "seed": seed}
    given = {key: value for key, value in parameters.items() if value is not None}
    changes = {"heads": heads or [], "dtype": dtype}
    if recipe is not None:
        if model or base or method or weight or given:
            raise RecipeError(
                "a recipe file says models, base, method, weights and parameters itself; "
                "give either the file or these options"
            )
        checked, notes = _from_file(recipe, changes)
    else:
        checked, notes = _from_options(model or [], base, method, weight or [], given, changes), []
    executor = LocalExecutor(workers, parse_bytes(max_memory) if max_memory else None, fork=True)
    max_shard_bytes = parse_bytes(shard_size)
    if out is None and not dry_run:
        raise RecipeError("say where to write the merged model with --out, or use --dry-run")
    if out is not None:
        out = local_path(out)
        check_target(out, 0, {}, overwrite=overwrite, resume=resume)

    keep_freed_memory()
    prepared = prepare(checked)
    if not quiet:
        display.show_notes([*notes, *prepared.notes])
    _check_memory(prepared, executor)
    if dry_run or out is None:
        _show_plan(prepared, executor, out, max_shard_bytes, as_json=as_json)
        return
    with display.progress_bars(quiet=quiet or as_json) as bars:
        merge_to_folder(
            prepared,
            out,
            executor=executor,
            overwrite=overwrite,
            resume=resume,
            allow_nonfinite=allow_nonfinite,
            max_shard_bytes=max_shard_bytes,
            progress=bars,
        )
    if as_json:
        print(json.dumps({"out": str(out), **_describe(prepared, executor, max_shard_bytes)}))
    elif not quiet:
        num = len(prepared.alignment.models)
        display.stdout.print(f"{num} models merged into {out}", markup=False)


def _from_file(path: Path, changes: dict[str, Any]) -> "tuple[Recipe, list[str]]":
    from matsmerge.recipes.reading import read_recipe
    from matsmerge.recipes.recipe import make_recipe

    recipe, notes = read_recipe(path)
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    data["heads"] = [*recipe.heads, *changes["heads"]]
    data["dtype"] = changes["dtype"] or recipe.dtype
    return make_recipe(data), notes


def _from_options(
    models: list[str],
    base: str | None,
    method: str | None,
    weights: list[float],
    parameters: dict[str, Any],
    changes: dict[str, Any],
) -> "Recipe":
    from matsmerge.recipes.recipe import make_recipe

    if not models:
        raise RecipeError("no models: give a recipe file, or a --model for each model to merge")
    if weights and len(weights) != len(models):
        raise RecipeError(f"{len(weights)} times --weight for {len(models)} models")
    entries: list[dict[str, Any]] = [{"model": path} for path in models]
    for entry, value in zip(entries, weights, strict=False):
        entry["weight"] = value
    return make_recipe(
        {
            "models": entries,
            "base": base,
            "method": {"name": method or "average", **parameters},
            **changes,
        }
    )


def _check_memory(prepared: "PreparedMerge", executor: "LocalExecutor") -> None:
    from matsmerge.engine.machine import format_bytes

    needed = prepared.plan.peak_bytes(1) + prepared.plan.measuring_bytes
    if needed > executor.max_bytes:
        raise RecipeError(
            f"this merge needs at least {format_bytes(needed)} of memory and --max-memory allows "
            f"{format_bytes(executor.max_bytes)}; allow more"
        )


def _describe(
    prepared: "PreparedMerge", executor: "LocalExecutor", max_shard_bytes: int
) -> dict[str, Any]:
    layout = prepared.layout(max_shard_bytes)
    peak = prepared.plan.peak_bytes(executor.num_workers)
    return {
        "models": [model.name for model in prepared.alignment.models],
        "method": prepared.recipe.method.name,
        "num_tensors": len(prepared.plan.parameters),
        "num_parameters": sum(p.spec.num_elements for p in prepared.plan.parameters),
        "num_jobs": len(prepared.plan.jobs),
        "read_bytes": prepared.plan.num_input_bytes * (2 if prepared.plan.is_measured else 1),
        "output_bytes": layout.num_bytes + prepared.num_head_bytes,
        "output_files": [shard.file_name for shard in layout.shards],
        "peak_bytes": min(peak, executor.max_bytes) + prepared.plan.measuring_bytes,
        "heads": {m.name: list(m.heads) for m in prepared.alignment.models if m.heads},
        "tied": dict(prepared.alignment.tied),
        "notes": list(prepared.notes),
    }


def _show_plan(
    prepared: "PreparedMerge",
    executor: "LocalExecutor",
    out: Path | None,
    max_shard_bytes: int,
    *,
    as_json: bool,
) -> None:
    import shutil

    from matsmerge.engine.machine import format_bytes

    plan = _describe(prepared, executor, max_shard_bytes)
    if as_json:
        print(json.dumps(plan, indent=2))
        return
    rules: dict[str, int] = {}
    for parameter in prepared.plan.parameters:
        copied = parameter.compute_dtype is None
        rule = "copied" if copied else repr(parameter.rule.method)
        rules[rule] = rules.get(rule, 0) + 1
    methods = [(f"  {rule}", f"{num} tensors") for rule, num in rules.items()]
    rows = [
        ("models", ", ".join(plan["models"])),
        ("tensors", f"{plan['num_tensors']:,}"),
        ("parameters", f"{plan['num_parameters']:,}"),
        *methods[:10],
        *([("  ...", f"{len(methods) - 10} more")] if len(methods) > 10 else []),
        ("heads kept apart", f"{sum(map(len, plan['heads'].values())):,} tensors"),
        ("to read", format_bytes(plan["read_bytes"])),
        (
            "to write",
            f"{format_bytes(plan['output_bytes'])} in {len(plan['output_files'])} file(s)",
        ),
        ("peak memory, estimated", format_bytes(plan["peak_bytes"])),
        ("memory allowed", format_bytes(executor.max_bytes)),
    ]
    if out is not None:
        parent = next(p for p in out.resolve().parents if p.exists())
        rows.append(("disk free", format_bytes(shutil.disk_usage(parent).free)))
    display.show_table(("plan", ""), rows)
