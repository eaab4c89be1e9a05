"""`mats merge`."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from matsmerge.cli import display
from matsmerge.cli import merge_options as options
from matsmerge.cli.merge_display import describe, show_plan, show_solutions
from matsmerge.cli.method_flags import parse_method
from matsmerge.cli.shared_options import AsJson, Quiet
from matsmerge.errors import RecipeError
from matsmerge.limits import MOST_KEPT

if TYPE_CHECKING:
    from matsmerge import Executor, PlannedMerge, Recipe


def merge(
    context: typer.Context,
    recipe: options.RecipeFile = None,
    out: options.Out = None,
    model: options.Models = None,
    base: options.Base = None,
    weight: options.Weights = None,
    statistics: options.Statistics = None,
    data: options.Data = None,
    set_: options.Assignments = None,
    trajectory: options.Trajectory = None,
    trace: options.Trace = None,
    force: options.Force = False,
    heads: options.Heads = None,
    ignore_tokenizers: options.IgnoreTokenizers = False,
    allow_nonfinite: options.AllowNonfinite = False,
    dtype: options.Dtype = None,
    shard_size: options.ShardSize = "5GB",
    overwrite: options.Overwrite = False,
    output: options.OutputKind = None,
    rank: options.Rank = None,
    align: options.Align = None,
    dry_run: options.DryRun = False,
    resume: options.Resume = False,
    verify: options.Verify = False,
    max_memory: options.MaxMemory = None,
    workers: options.Workers = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Merge models into one.

    Either from a recipe file:

        mats merge recipe.yaml --out merged

    or from options alone:

        mats merge --method task_arithmetic --scale 0.3 --base B --model A --model C --out merged

        mats merge --method mats_kfac --base B --model A --model C --statistics a.safetensors
        --statistics c.safetensors --out merged

    Adapters are models like others; they know their base:

        mats merge --method ties --align knots --model LORA1 --model LORA2 --out merged
    """
    import matsmerge
    from matsmerge.byte_sizes import parse_bytes
    from matsmerge.checkpoints.source import local_path
    from matsmerge.engine.machine import keep_freed_memory
    from matsmerge.engine.output_folder import check_target
    from matsmerge.files.output_place import check_file

    method = parse_method(context.obj, set_ or ())
    changes = {
        "heads": heads or [],
        "dtype": dtype,
        "trajectory": _parse_list(trajectory),
        "output": output,
        "rank": int(rank) if rank is not None and re.fullmatch(r"[0-9]{1,9}", rank) else rank,
        "align": align,
        "ignore_tokenizers": ignore_tokenizers,
    }
    if recipe is not None:
        if model or base or weight or statistics or data or method:
            raise RecipeError(
                "a recipe file says models, base, method, weights, statistics, data and "
                "parameters itself; give either the file or these options"
            )
        checked, notes = _from_file(recipe, changes)
    else:
        entries = _entries(model or [], weight or [], statistics or [], data or [])
        checked, notes = _from_options(entries, base, method, changes), []
    memory = parse_bytes(max_memory) if max_memory else None
    executor = matsmerge.LocalExecutor(workers, memory, fork=True)
    max_shard_bytes = parse_bytes(shard_size)
    if out is None and not dry_run:
        raise RecipeError("say where to write the merged model with --out, or use --dry-run")
    if out is not None:
        out = local_path(out)
        check_target(out, 0, {}, overwrite=overwrite, resume=resume)
    if trace is not None:
        check_file(local_path(trace), overwrite=overwrite)

    keep_freed_memory()
    loads = any(entry.data for entry in checked.models)
    with display.status("loading the models", quiet=quiet or as_json or not loads):
        planned = matsmerge.plan(checked, force=force)
    if not quiet:
        display.show_notes([*notes, *planned.notes])
    _check_memory(planned, executor)
    if dry_run or out is None:
        show_plan(planned, executor, out, max_shard_bytes, as_json=as_json)
        return
    with display.progress_bars(quiet=quiet or as_json) as bars:
        merged = planned.merge(
            out,
            executor=executor,
            progress=bars,
            overwrite=overwrite,
            resume=resume,
            verify=verify,
            allow_nonfinite=allow_nonfinite,
            max_shard_bytes=max_shard_bytes,
            trace=trace,
        )
    if as_json:
        print(json.dumps({"out": str(out), **describe(planned, executor, max_shard_bytes)}))
    elif not quiet:
        show_solutions(merged)
        display.show_energies(merged.report.get("lora", {}))
        display.stdout.print(f"{len(checked.models)} models merged into {out}")


def _parse_list(text: str | None) -> list[int]:
    """Numbers as `10,20,50`, or `10:100:10` for every tenth up to 100."""
    if text is None:
        return []
    try:
        if ":" in text:
            first, last, step = map(int, text.split(":"))
            numbers: Sequence[int] = range(first, last + 1, step)
            num = (last - first) // step + 1  # `len` has a limit
        else:
            numbers = [int(part) for part in text.split(",")]
            num = len(numbers)
    except (ValueError, ZeroDivisionError):
        num = 0
    if num > MOST_KEPT:
        raise RecipeError(
            f"--trajectory: '{text}' are {num:,} models to write; at most {MOST_KEPT:,} are "
            "possible, take larger steps"
        )
    if num <= 0:
        raise RecipeError(f"--trajectory: expected 10,20,50 or 10:100:10, found '{text}'")
    return list(numbers)


def _entries(
    models: list[str], weights: list[float], statistics: list[str], data: list[str]
) -> list[dict[str, Any]]:
    """The models of a recipe, each with its weight, statistics and data."""
    if not models:
        raise RecipeError("no models: give a recipe file, or a --model for each model to merge")
    entries: list[dict[str, Any]] = [{"model": path} for path in models]
    given: dict[str, list[Any]] = {"weight": weights, "statistics": statistics, "data": data}
    for key, values in given.items():
        if values and len(values) != len(models):
            raise RecipeError(f"{len(values)} times --{key} for {len(models)} models")
        for entry, value in zip(entries, values, strict=False):
            entry[key] = value
    return entries


def _from_file(path: Path, changes: dict[str, Any]) -> "tuple[Recipe, list[str]]":
    from matsmerge.recipes.recipe import make_recipe
    from matsmerge.recipes.recipe_file import read_recipe

    recipe, notes = read_recipe(path)
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    data |= {key: value for key, value in changes.items() if value}
    data["heads"] = [*recipe.heads, *changes["heads"]]
    return make_recipe(data), notes


def _from_options(
    entries: list[dict[str, Any]],
    base: str | None,
    method: dict[str, Any],
    changes: dict[str, Any],
) -> "Recipe":
    from matsmerge.recipes.recipe import make_recipe

    # An objective or an init without a method is the general one.
    default = "mats" if method.keys() & {"init", "objective", "solver"} else "average"
    return make_recipe(
        {"models": entries, "base": base, "method": {"name": default, **method}, **changes}
    )


def _check_memory(planned: "PlannedMerge", executor: "Executor") -> None:
    from matsmerge.byte_sizes import format_bytes

    prepared = planned.prepared
    needed = prepared.plan.peak_bytes(1) + prepared.plan.measuring_bytes
    needed += prepared.prefix.num_held_bytes if prepared.prefix else 0
    if needed > executor.max_bytes:
        raise RecipeError(
            f"this merge needs at least {format_bytes(needed)} of memory and --max-memory allows "
            f"{format_bytes(executor.max_bytes)}; allow more"
        )
