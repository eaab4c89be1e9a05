"""`mats merge`."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from matsmerge.byte_sizes import format_bytes, parse_bytes
from matsmerge.cli import merge_options
from matsmerge.cli.display import JsonScreen
from matsmerge.cli.field_options import takes_options
from matsmerge.cli.merge_display import (
    describe_merge,
    show_energies,
    show_plan,
    show_solutions,
    show_what_is_next,
)
from matsmerge.cli.method_flags import MergeCommand, parse_method
from matsmerge.errors import RecipeError
from matsmerge.files.output_place import check_file
from matsmerge.limits import MOST_KEPT
from matsmerge.problems import counted
from matsmerge.recipes.known_options import check_early

if TYPE_CHECKING:
    from matsmerge import Executor, PlannedMerge, Recipe


__all__ = ["MergeCommand", "merge"]


@takes_options
def merge(
    context: typer.Context,
    general: merge_options.General,
    parts: merge_options.WithoutFile,
    solving: merge_options.Solving,
    files: merge_options.OutputFiles,
    adapters: merge_options.Adapters,
    running: merge_options.MergeRunOptions,
    screen: JsonScreen,
) -> None:
    r"""Merge models into one.

    Either from a recipe file:

        mats merge recipe.yaml --out merged

    or from models and options:

        mats merge A C --base B --method task_arithmetic --scale 0.3 --out merged

        mats merge one=A two=C --base B --method mats_kfac \
            --statistics a.safetensors --statistics c.safetensors --out merged

    Adapters are models like others; they know their base:

        mats merge LORA1 LORA2 --method ties --align knots --out merged
    """
    method = parse_method(context.obj, parts.set_)
    changes = {
        "heads": general.heads,
        "dtype": files.dtype,
        "device": running.device,
        "trajectory": _parse_list(solving.trajectory),
        **dict(adapters),
        "match_heads": general.match_heads,
        "tokenizer": _tokenizer(general),
        "ignore_tokenizers": general.ignore_tokenizers,
    }
    if adapters.rank is not None and re.fullmatch(r"[0-9]{1,9}", adapters.rank):
        changes["rank"] = int(adapters.rank)
    recipe, models = _recipe_or_models(general.given, parts)
    if recipe is not None:
        if method or any(value for _, value in parts):
            raise RecipeError(
                "a recipe file says models, base, method, weights, statistics, data and "
                "parameters itself; give either the file or these options"
            )
        recipes, notes = _from_file(recipe, changes)
    else:
        recipes, notes = [_from_options(models, parts, method, changes)], []
    import matsmerge
    from matsmerge.engine.hub_push import check_repo
    from matsmerge.engine.machine import keep_freed_memory
    from matsmerge.engine.output_folder import check_target

    memory = parse_bytes(running.max_memory) if running.max_memory else None
    last = recipes[-1]
    executor: Executor = running.on_ray(
        last.executor, running.workers, memory
    ) or matsmerge.LocalExecutor(running.workers, memory, fork=True, device=last.device)
    max_shard_bytes = parse_bytes(files.shard_size)
    out = general.out
    if out is None and not running.dry_run:
        raise RecipeError("say where to write the merged model with --out, or use --dry-run")
    if out is not None:
        check_target(out, overwrite=running.overwrite, resume=running.resume)
    if files.push is not None:
        check_repo(files.push)
    if solving.trace is not None:
        check_file(solving.trace, overwrite=running.overwrite)

    keep_freed_memory()
    loads = any(entry.data for recipe in recipes for entry in recipe.models)
    with screen.status("loading the models") if loads else nullcontext():
        planned = matsmerge.plan(recipes, force=solving.force)
    screen.notes([*notes, *planned.notes])
    check_memory(planned, executor)
    described = describe_merge(planned, executor, max_shard_bytes)
    if running.dry_run or out is None:
        show_plan(planned, described, executor, out, screen)
        return
    with screen.bars() as bars:
        merged = planned.merge(
            out,
            executor=executor,
            progress=bars,
            overwrite=running.overwrite,
            resume=running.resume,
            verify=running.verify,
            allow_nonfinite=general.allow_nonfinite,
            max_shard_bytes=max_shard_bytes,
            trace=solving.trace,
            intermediates=files.intermediates,
        )
    screen.result({"out": str(out), **described})
    show_solutions(merged, screen)
    show_energies(merged.report.get("lora", {}), screen)
    screen.say(f"{counted(planned.recipe.models, 'model')} merged into {out}")
    if files.push is not None:
        matsmerge.push(out, files.push, public=files.public)
        screen.say(f"{out} is on the hub as {files.push}")
    show_what_is_next(merged, out, screen)


def _parse_list(text: str | None) -> list[int]:
    """Numbers as `10,20,50`, or `10:100:10` for every tenth up to 100."""
    if text is None:
        return []
    try:
        if ":" in text:
            first, last, step = map(int, text.split(":"))
            numbers: Sequence[int] = range(first, last + 1, step)
            num = (last - first) // step + 1 if step > 0 else 0  # `len` has a limit
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


def _tokenizer(general: merge_options.General) -> dict[str, Any]:
    """What the command line says of the tokenizer."""
    tokens: dict[str, Any] = {}
    for text in general.token:
        token, _, source = text.rpartition("=")
        if not token or not source:
            raise RecipeError(f"--token: expected TOKEN=MODEL, found '{text}'")
        tokens[token] = {"source": {"kind": source} if source in ("mean", "zero") else source}
    given = {
        "source": general.tokenizer,
        "pad_to_multiple_of": general.pad_to_multiple_of,
        "tokens": tokens,
    }
    return {key: value for key, value in given.items() if value}


def _with_changes(tokenizer: Any, changes: dict[str, Any]) -> Any:
    """The tokenizer of a recipe with what the command line says of it."""
    if not changes:
        return tokenizer
    earlier = tokenizer or {"source": "base"}
    tokens = {**earlier.get("tokens", {}), **changes.get("tokens", {})}
    return {**earlier, **changes, "tokens": tokens}


def _recipe_or_models(
    given: Sequence[str], parts: merge_options.WithoutFile
) -> tuple[Path | None, list[str]]:
    """The recipe file, or the models, that a command line names.

    A single argument is a recipe, unless it stands beside options that recipes have themselves.
    """
    from matsmerge.files.guarded_files import local_path

    are_recipes = [local_path(text).suffix in (".yaml", ".yml") for text in given]
    if len(given) == 1 and (are_recipes[0] or not any(value for _, value in parts)):
        return local_path(given[0]), []
    if any(are_recipes):
        raise RecipeError(f"{given[are_recipes.index(True)]}: give one recipe file alone")
    return None, [*given, *parts.model]


def _from_file(path: Path, changes: dict[str, Any]) -> "tuple[list[Recipe], list[str]]":
    """The recipes of a file, the last of them with what the command line changes."""
    check_early(path)
    from matsmerge.recipes.recipe import make_recipe
    from matsmerge.recipes.recipe_file import read_recipes

    (*earlier, recipe), notes = read_recipes(path)
    data = recipe.model_dump(mode="json", exclude_defaults=True) | {"executor": recipe.executor}
    changes["tokenizer"] = _with_changes(data.get("tokenizer"), changes["tokenizer"])
    data |= {key: value for key, value in changes.items() if value}
    if changes["match_heads"] is not None:
        data["match_heads"] = changes["match_heads"]
    data["heads"] = [*recipe.heads, *changes["heads"]]
    return [*earlier, make_recipe(data)], notes


def _from_options(
    models: Sequence[str],
    parts: merge_options.WithoutFile,
    method: dict[str, Any],
    changes: dict[str, Any],
) -> "Recipe":
    from matsmerge.checkpoints.public_names import split_name
    from matsmerge.recipes.recipe import make_recipe

    if not models:
        raise RecipeError("no models: give a recipe file, or the models to merge")
    entries: list[dict[str, Any]] = []
    for name, source in map(split_name, models):
        entries.append({"model": source} | ({"name": name} if name else {}))
    for key in ("weight", "statistics", "data"):
        values = getattr(parts, key)
        if values and len(values) != len(entries):
            raise RecipeError(f"{len(values)} times --{key} for {len(entries)} models")
        for entry, value in zip(entries, values, strict=False):
            entry[key] = value
    changes["tokenizer"] = _with_changes(None, changes["tokenizer"])
    # An objective or an init without a method is the general one.
    default = "mats" if method.keys() & {"init", "objective", "solver"} else "average"
    return make_recipe(
        {"models": entries, "base": parts.base, "method": {"name": default, **method}, **changes}
    )


def check_memory(planned: "PlannedMerge", executor: "Executor") -> None:
    import matsmerge

    if planned.least_bytes > executor.max_bytes:
        raise RecipeError(
            f"this merge needs at least {format_bytes(planned.least_bytes)} of memory and "
            f"--max-memory allows {format_bytes(executor.max_bytes)}; allow more"
        )
    least = planned.prepared.plan.peak_bytes(1)
    if isinstance(executor, matsmerge.RayExecutor) and least > executor.largest_job_bytes:
        raise RecipeError(
            f"a job of this merge needs {format_bytes(least)} of memory and the largest node of "
            f"the Ray cluster has {format_bytes(executor.largest_job_bytes)}; use larger nodes"
        )
