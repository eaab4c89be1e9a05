"""`mats merge`."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matsmerge.cli import display
from matsmerge.cli.merge_display import describe, show_plan, show_solutions
from matsmerge.cli.options import RUNNING, AsJson, Quiet
from matsmerge.errors import RecipeError
from matsmerge.limits import MOST_COUNTED, MOST_ITERATIONS, MOST_KEPT, NUM_SEEDS

if TYPE_CHECKING:
    from matsmerge.engine.executor import LocalExecutor
    from matsmerge.engine.preparing import PreparedMerge
    from matsmerge.recipes.recipe import Recipe

_WITHOUT_FILE = "Without a recipe file"
_SOLVING = "Solving linear systems (mats and its kin)"
_ADAPTERS = "Adapters (PEFT)"


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
            help="average, task_arithmetic, ties, dare_linear, dare_ties, slerp, model_stock; with "
            "statistics: mats_kfac, mats, regmean, diagonal_fisher, block_fisher; from the weights "
            "alone: actmat, wudi, tact, centered_actmat; with data: regmean++.",
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
        typer.Option(
            min=0,
            max=NUM_SEEDS - 1,
            help="Seed of the random choice (dare_*).",
            rich_help_panel=_WITHOUT_FILE,
        ),
    ] = None,
    statistics: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="What `mats collect` wrote, in the order of the models. Repeat for each. Default: "
            "statistics.safetensors beside each model.",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="A model's data, or a task file (.yaml) that names it, for --inputs merged and "
            "regmean++; in the order of the models. Repeat for each.",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="own, or merged: Gram matrices along the merged model, block after block.",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where to start: any method. --scale and --density are the init's.",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="gram, kfac, fisher, block_fisher, identity; actmat, wudi, tact, centered_actmat.",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    solver: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cg or closed_form.", rich_help_panel=_SOLVING),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MOST_ITERATIONS,
            help="Of conjugate gradients.",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Stop at this relative residual.", rich_help_panel=_SOLVING),
    ] = None,
    preconditioner: Annotated[
        str | None,
        typer.Option(help="none, jacobi, kronecker (kfac).", rich_help_panel=_SOLVING),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(help="Of the kronecker preconditioner.", rich_help_panel=_SOLVING),
    ] = None,
    stop: Annotated[
        str | None,
        typer.Option(
            help="fixed, or held_out: at the lowest objective on held-out statistics.",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    off_diagonal: Annotated[
        float | None,
        typer.Option(
            help="Factor on what is off the diagonal of Gram matrices, RegMean's lambda.",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    per: Annotated[
        str | None,
        typer.Option(
            help="What K-FAC's output factors are means over: example (default), or token, as the "
            "paper's code does; then models with long examples count less.",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    ridge: Annotated[
        float | None,
        typer.Option(
            help="Added to the diagonal of each covariance, of K-FAC to both factors; relative to "
            "its mean.",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    bias: Annotated[
        bool | None,
        typer.Option(
            "--bias/--no-bias",
            help="Join each bias to its weight (gram, kfac).",
            show_default=False,
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    embeddings: Annotated[
        bool | None,
        typer.Option(
            "--embeddings/--no-embeddings",
            help="Merge embeddings by how often tokens occur (gram, kfac).",
            show_default=False,
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    equalize: Annotated[
        bool | None,
        typer.Option(
            "--equalize/--no-equalize",
            help="Give all models' covariances of a layer the same trace (gram, kfac).",
            show_default=False,
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    otherwise: Annotated[
        str | None,
        typer.Option(
            help="What parameters get that the objective has nothing for: average, init.",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    trajectory: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Write a model for each of these iterations, from one run: 10,20,50 or "
            # With the backslash, 100 between colons is no emoji.
            "10:100\\:10. They go to OUT/iteration-N.",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write residual and objective of every layer and iteration (JSON lines).",
            rich_help_panel=_SOLVING,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Use statistics that were collected from another model.",
            rich_help_panel=_SOLVING,
        ),
    ] = False,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Pattern of parameters that belong to one task alone, e.g. 'classifier.*': kept "
            "per model in heads/, not merged. Repeatable; adds to the recipe's.",
        ),
    ] = None,
    ignore_tokenizers: Annotated[
        bool,
        typer.Option(
            "--ignore-tokenizers",
            help="Merge models whose tokenizers give tokens different ids all the same.",
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Dtype of the output: float32, bfloat16, float16, float64. Default: the inputs'.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="dense: a full model; adapter: a LoRA or (IA)^3 adapter. Default: an adapter if "
            "all models are adapters of one kind.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="Rank of the LoRA to write, or `concatenate` for the exact sum (average, "
            "task_arithmetic). Default: the sum of the adapters' ranks.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = None,
    align: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="knots: merge LoRA adapters in the space their outputs share (ties, dare_*).",
            rich_help_panel=_ADAPTERS,
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
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare every byte of the inputs before and after the merge, and when it is "
            "resumed. Otherwise their sizes, times and inodes are compared.",
        ),
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
            rich_help_panel=RUNNING,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_COUNTED,
            help="Jobs at once. Default: all cores.",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest file to write.", rich_help_panel=RUNNING)
    ] = "5GB",
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
    from matsmerge.checkpoints.opening import local_path
    from matsmerge.engine.executor import LocalExecutor
    from matsmerge.engine.machine import keep_freed_memory, parse_bytes
    from matsmerge.engine.merge_file import read_merge_file
    from matsmerge.engine.merging import merge_to_folder
    from matsmerge.engine.output_folder import MANIFEST, check_new_file, check_target
    from matsmerge.engine.preparing import prepare

    parameters = {
        "scale": scale,
        "density": density,
        "trim": trim,
        "seed": seed,
        "init": init,
        "objective": objective,
        "solver": solver,
        "iterations": iterations,
        "tolerance": tolerance,
        "preconditioner": preconditioner,
        "damping": damping,
        "stop": stop,
        "off_diagonal": off_diagonal,
        "per": per,
        "ridge": ridge,
        "bias": bias,
        "embeddings": embeddings,
        "equalize": equalize,
        "otherwise": otherwise,
        "inputs": inputs,
    }
    given = {key: value for key, value in parameters.items() if value is not None}
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
        if model or base or method or weight or statistics or data or given:
            raise RecipeError(
                "a recipe file says models, base, method, weights, statistics, data and "
                "parameters itself; give either the file or these options"
            )
        checked, notes = _from_file(recipe, changes)
    else:
        entries = _entries(model or [], weight or [], statistics or [], data or [])
        checked, notes = _from_options(entries, base, method, given, changes), []
    executor = LocalExecutor(workers, parse_bytes(max_memory) if max_memory else None, fork=True)
    max_shard_bytes = parse_bytes(shard_size)
    if out is None and not dry_run:
        raise RecipeError("say where to write the merged model with --out, or use --dry-run")
    if out is not None:
        out = local_path(out)
        check_target(out, 0, {}, overwrite=overwrite, resume=resume)

    keep_freed_memory()
    if trace is not None:
        check_new_file(local_path(trace), overwrite=overwrite)
    loads = any(entry.data for entry in checked.models)
    with display.status("loading the models", quiet=quiet or as_json or not loads):
        prepared = prepare(checked, force=force)
    if not quiet:
        display.show_notes([*notes, *prepared.notes])
    _check_memory(prepared, executor)
    if dry_run or out is None:
        show_plan(prepared, executor, out, max_shard_bytes, as_json=as_json)
        return
    with display.progress_bars(quiet=quiet or as_json) as bars:
        merge_to_folder(
            prepared,
            out,
            executor=executor,
            overwrite=overwrite,
            resume=resume,
            verify=verify,
            allow_nonfinite=allow_nonfinite,
            max_shard_bytes=max_shard_bytes,
            progress=bars,
            trace=None if trace is None else local_path(trace),
        )
    if as_json:
        print(json.dumps({"out": str(out), **describe(prepared, executor, max_shard_bytes)}))
    elif not quiet:
        manifest = read_merge_file(out / MANIFEST)
        show_solutions(manifest)
        display.show_energies(manifest.get("lora", {}))
        num = len(prepared.alignment.models)
        display.stdout.print(f"{num} models merged into {out}")


def _parse_list(text: str | None) -> list[int]:
    """Numbers as `10,20,50`, or `10:100:10` for every tenth up to 100."""
    if text is None:
        return []
    try:
        if ":" in text:
            first, last, step = map(int, text.split(":"))
            num = (last - first) // step + 1
            numbers = list(range(first, last + 1, step)) if num <= MOST_KEPT else []
        else:
            numbers = [int(part) for part in text.split(",")]
            num = len(numbers)
    except (ValueError, ZeroDivisionError):
        numbers, num = [], 0
    if num > MOST_KEPT:
        raise RecipeError(
            f"--trajectory: '{text}' are {num:,} models to write; at most {MOST_KEPT:,} are "
            "possible, take larger steps"
        )
    if not numbers:
        raise RecipeError(f"--trajectory: expected 10,20,50 or 10:100:10, found '{text}'")
    return numbers


def _entries(
    models: list[str], weights: list[float], statistics: list[str], data: list[str]
) -> list[dict[str, Any]]:
    """The models of a recipe, each with its weight, statistics and data."""
    if not models:
        raise RecipeError("no models: give a recipe file, or a --model for each model to merge")
    entries: list[dict[str, Any]] = [{"model": path} for path in models]
    for option, key, values in (
        ("--weight", "weight", weights),
        ("--statistics", "statistics", statistics),
        ("--data", "data", data),
    ):
        if values and len(values) != len(models):
            raise RecipeError(f"{len(values)} times {option} for {len(models)} models")
        for entry, value in zip(entries, values, strict=False):
            entry[key] = value
    return entries


def _from_file(path: Path, changes: dict[str, Any]) -> "tuple[Recipe, list[str]]":
    from matsmerge.recipes.reading import read_recipe
    from matsmerge.recipes.recipe import make_recipe

    recipe, notes = read_recipe(path)
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    data |= {key: value for key, value in changes.items() if value}
    data["heads"] = [*recipe.heads, *changes["heads"]]
    return make_recipe(data), notes


def _from_options(
    entries: list[dict[str, Any]],
    base: str | None,
    method: str | None,
    parameters: dict[str, Any],
    changes: dict[str, Any],
) -> "Recipe":
    from matsmerge.recipes.recipe import make_recipe

    # An objective or an init without a method is the general one.
    default = "mats" if parameters.keys() & {"init", "objective", "solver"} else "average"
    return make_recipe(
        {
            "models": entries,
            "base": base,
            "method": {"name": method or default, **parameters},
            **changes,
        }
    )


def _check_memory(prepared: "PreparedMerge", executor: "LocalExecutor") -> None:
    from matsmerge.engine.machine import format_bytes

    needed = prepared.plan.peak_bytes(1) + prepared.plan.measuring_bytes
    needed += prepared.prefix.num_held_bytes if prepared.prefix else 0
    if needed > executor.max_bytes:
        raise RecipeError(
            f"this merge needs at least {format_bytes(needed)} of memory and --max-memory allows "
            f"{format_bytes(executor.max_bytes)}; allow more"
        )
