"""`mats collect`."""

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matsmerge.cli import display
from matsmerge.cli.shared_options import RUNNING, AsJson, BatchSize, MaxTokens, Quiet
from matsmerge.limits import MOST_AT_ONCE, MOST_COUNTED, MOST_SAMPLES, NUM_SEEDS

if TYPE_CHECKING:
    from matsmerge.data.rows import Data
    from matsmerge.statistics.prepared_collection import PreparedCollection
    from matsmerge.statistics.statistics import Statistics
    from matsmerge.tasks.task_file import TaskFile

_DATA_HELP = (
    "JSONL, CSV, TSV (also .gz) or Parquet file, a folder saved by datasets or of images, or a "
    "dataset on the hub. Repeat for each model."
)
_KINDS_HELP = (
    "Kinds, separated by commas: gram (RegMean, MaTS), kfac (block Fisher of linear layers), "
    "fisher (diagonal), block_fisher (of vectors, as in (IA)^3)."
)
_FISHER_HELP = (
    "empirical: gradients for the given answers. true: for answers as likely as the model finds "
    "them; summed over up to 32 classes or choices, else drawn."
)
_SAMPLES_HELP = "Answers drawn per example, where the true Fisher is sampled."
_PARAMETERS_HELP = (
    "Only parameters that match, e.g. 'encoder.*'. Repeatable. Default: all; of adapters, what "
    "one of them changes."
)
_HELD_OUT_HELP = (
    "Share of the examples for a second set, kept apart, by which iterations can be chosen "
    "without labels."
)
_COLUMNS_HELP = (
    "Which columns are meant, e.g. text=sentence,label=gold. Classification has text, text_pair, "
    "label; tokens, labels for words; image, label for images; seq2seq and language models input, "
    "target (or text alone); multiple choice input, choices, label."
)
_LENGTH_HELP = "Tokens to cut texts to. Default: what the model takes, at most 512."
_TASK_HELP = (
    "sequence_classification, token_classification, seq2seq, causal_lm, multiple_choice, "
    "image_classification, or a task file (YAML) that says this and what the options here say; "
    "repeat for each model, or one for all. Default: by the model."
)
_HEAD_HELP = "File with the head's parameters, for a model stored without."
_data = partial(typer.Option, rich_help_panel="Data")
_model = partial(typer.Option, rich_help_panel="Model")
_running = partial(typer.Option, rich_help_panel=RUNNING)


def collect(
    models: Annotated[
        list[str],
        typer.Argument(
            help="A model: folder or hub id, or a PEFT adapter's. Of several adapters on one base, "
            "the base is loaded once.",
            metavar="MODEL...",
        ),
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write, NAME.safetensors; repeat for each model. Default: "
            "statistics.safetensors in the model's folder, where `mats merge` finds it.",
            metavar="FILE",
        ),
    ] = None,
    data: Annotated[list[str] | None, _data(help=_DATA_HELP, metavar="FILE")] = None,
    statistics: Annotated[str, typer.Option(help=_KINDS_HELP, metavar="KINDS")] = "gram",
    fisher: Annotated[str, typer.Option(help=_FISHER_HELP)] = "empirical",
    loss: Annotated[
        str, typer.Option(help="log p(y|x) as the sum or the mean over the tokens of y.")
    ] = "sum",
    num_samples: Annotated[int, typer.Option(min=1, max=MOST_SAMPLES, help=_SAMPLES_HELP)] = 1,
    parameters: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help=_PARAMETERS_HELP)
    ] = None,
    held_out: Annotated[float, typer.Option(help=_HELD_OUT_HELP)] = 0.0,
    no_bias: Annotated[
        bool,
        typer.Option("--no-bias", help="Do not keep the mean inputs that joining biases needs."),
    ] = False,
    seed: Annotated[
        int, typer.Option(min=1 - NUM_SEEDS, max=NUM_SEEDS - 1, help="Of everything random.")
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(help="Of the file: float32, bfloat16 (half the size, 3 digits), float64."),
    ] = "float32",
    num_examples: Annotated[
        int, _data(min=0, max=MOST_COUNTED, help="The first so many examples; 0: all.")
    ] = 1000,
    shuffle: Annotated[bool, _data("--shuffle", help="Examples at random, not the first.")] = False,
    columns: Annotated[str | None, _data(help=_COLUMNS_HELP, metavar="NAMES")] = None,
    split: Annotated[str | None, _data(help="Of a dataset with several.")] = None,
    max_length: Annotated[int | None, _data(min=1, max=MOST_AT_ONCE, help=_LENGTH_HELP)] = None,
    task: Annotated[list[str] | None, _model(help=_TASK_HELP)] = None,
    head: Annotated[str | None, _model(help=_HEAD_HELP, metavar="FILE")] = None,
    tokenizer: Annotated[
        str | None, _model(help="Folder with the tokenizer, if not the model's.")
    ] = None,
    model_dtype: Annotated[
        str | None, _model(help="Dtype to run the model in. Default: as stored.")
    ] = None,
    device: Annotated[str | None, _model(help="cpu, cuda, cuda:1, ...")] = None,
    device_map: Annotated[
        str | None, _model(help="'auto' spreads a model over all devices, memory and disk.")
    ] = None,
    batch_size: BatchSize = 32,
    max_tokens: MaxTokens = 4096,
    overwrite: Annotated[bool, _running("--overwrite", help="Replace the file.")] = False,
    resume: Annotated[
        bool, _running("--resume", help="Continue a collection that was interrupted.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure what a model does on its data, once, into one file that others can merge with.

        mats collect tuned/sst2 --data sst2.jsonl --statistics gram,fisher --out sst2.safetensors

    Several adapters on one base, each with its data; each file goes into the adapter's folder:

        mats collect lora/a lora/b --data a.jsonl --data b.jsonl --statistics kfac

    With several processes: torchrun --nproc-per-node 4 -m matsmerge collect ...
    """
    from matsmerge.models.kept_base import KeptBase
    from matsmerge.statistics.collection_options import make_options
    from matsmerge.statistics.collection_run import Output, check_output
    from matsmerge.statistics.prepared_collection import Choice, PreparedCollection, prepare
    from matsmerge.statistics.processes import join_processes
    from matsmerge.statistics.statistics_file import parse_dtype
    from matsmerge.tasks.loaded_model import load_model

    process = join_processes()
    quiet = quiet or not process.is_first
    options = make_options(
        statistics=statistics,
        fisher=fisher,
        reduction=loss,
        num_samples=num_samples,
        seed=seed,
        bias=not no_bias,
        parameters=parameters or ["*"],
        held_out=held_out,
    )
    parse_dtype(dtype)
    targets = _targets(models, out or [])
    for target in targets:
        check_output(target, overwrite=overwrite, resume=resume, may_be_finished=resume)
    asked = _asked(
        len(models),
        task or [],
        data or [],
        {
            "split": split,
            "columns": columns,
            "max_length": max_length,
            "head": head,
            "tokenizer": tokenizer,
        },
    )
    if process.num_processes > 1 and device is None and device_map is None:
        device = _own_device()
    also, are_adapters = _changed_by_adapters(models)
    kept = KeptBase()

    def ready(i: int) -> PreparedCollection:
        described, rows = asked[i]
        with display.status(f"loading {models[i]}", quiet=quiet or as_json):
            loaded = load_model(
                models[i],
                task=described.task,
                head=described.head,
                tokenizer=described.tokenizer,
                options=described.options(need_targets=options.wants_targets),
                dtype=model_dtype,
                device=device,
                device_map=device_map,
                also=parameters or also,
                kept=kept,
            )
        choice = Choice(
            num_examples or None,
            shuffle,
            described.columns,
            described.wordings,
            batch_size,
            max_tokens,
        )
        return prepare(loaded, rows, options, choice)

    if len(models) > 1 and are_adapters:
        for i in range(len(models)):  # what is wrong with the last is said before the first runs
            ready(i)
    reports = []
    for i, target in enumerate(targets):
        prepared = ready(i)
        if not quiet and not as_json:
            display.show_notes(prepared.notes)
        with display.progress_bars(quiet=quiet or as_json) as bars:
            collected = prepared.run(Output(target, dtype, resume, overwrite), bars)
        if not quiet and not as_json:
            display.show_notes(prepared.collection.notes)
        if process.is_first and as_json:
            reports.append(_describe(prepared, collected, target))
        elif process.is_first and not quiet:
            _show(collected, target)
    if process.is_first and as_json:
        print(json.dumps(reports if len(models) > 1 else reports[0], indent=2))


def _targets(models: list[str], out: list[Path]) -> list[Path]:
    """Where to write the statistics of each model."""
    from matsmerge.checkpoints.source import local_path
    from matsmerge.engine.evidence import BESIDE
    from matsmerge.errors import RecipeError

    if not out:
        folders = [local_path(model) for model in models]
        elsewhere = [str(f) for f in folders if not f.is_dir()]
        if elsewhere:
            raise RecipeError(
                [f"{name}: is no local folder; say where to write with --out" for name in elsewhere]
            )
        return [folder / BESIDE for folder in folders]
    if len(out) != len(models):
        raise RecipeError(f"{len(out)} times --out for {len(models)} models; give one for each")
    targets = [local_path(path) for path in out]
    if len({target.resolve() for target in targets}) < len(targets):
        raise RecipeError("two models would be written to the same --out; give each its own")
    return targets


def _asked(
    num_models: int, tasks: list[str], data: list[str], given: dict[str, Any]
) -> "list[tuple[TaskFile, Data]]":
    """What each model is asked, and its data."""
    from matsmerge.errors import DataError, RecipeError
    from matsmerge.tasks.splits import read_split

    for option, values in (("--task", tasks), ("--data", data)):
        if values and len(values) not in (1, num_models):
            raise RecipeError(
                f"{len(values)} times {option} for {num_models} models; give one for each, or one "
                "for all"
            )
    asked = []
    for i in range(num_models):
        own = tasks[i % len(tasks)] if tasks else None
        file = data[i % len(data)] if data else None
        described = _task_file(own, {**given, "data": file})
        if described.data is None:
            raise DataError("say which data to use with --data FILE")
        asked.append((described, read_split(described)))
    return asked


def _changed_by_adapters(models: list[str]) -> tuple[list[str], bool]:
    """Weights that some of several LoRAs changes, and whether all models are adapters.

    To merge LoRAs that change different weights, statistics of all of these are needed.
    """
    from matsmerge.adapters.adapter_folder import read_adapter
    from matsmerge.checkpoints.source import open_checkpoint

    adapters = [read_adapter(open_checkpoint(model)) for model in models]
    found = [a for a in adapters if a is not None]
    weights = {w: None for a in found if a.kind.is_folded for w in a.weights}
    return list(weights), len(found) == len(models)


def _task_file(task: str | None, given: dict[str, Any]) -> "TaskFile":
    """What a task file says, and options over it."""
    from matsmerge.errors import DataError, closest
    from matsmerge.tasks.kinds import TASKS
    from matsmerge.tasks.task_file import TaskFile, parse_columns, read_task_file

    if task is None or task in TASKS:
        described = TaskFile(task=task)
    elif Path(task).suffix in (".yaml", ".yml", ".json"):
        described = read_task_file(task)
    else:
        raise DataError(
            f"--task '{task}': expected a task file (.yaml) or one of {', '.join(TASKS)}"
            f"{closest(task, TASKS)}"
        )
    changes = {key: value for key, value in given.items() if value is not None}
    if "columns" in changes:
        changes["columns"] = {**described.columns, **parse_columns(changes["columns"])}
    return described.model_copy(update=changes)


def _own_device() -> str | None:
    """The device of one of several processes on a machine."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else None


def _describe(
    prepared: "PreparedCollection", collected: "Statistics", target: Path
) -> dict[str, Any]:
    header = collected.header
    return {
        "out": str(target),
        "num_bytes": target.stat().st_size,
        "model": header.model.model_dump(),
        "data": [origin.model_dump() for origin in header.data],
        "sets": {name: s.num_examples for name, s in header.sets.items()},
        "num_maps": len(header.maps),
        "num_grams": len({m.inputs for m in header.maps if m.inputs is not None}),
        "parameters": {kind: len(collected.parameters(kind)) for kind in collected.kinds},
        "without": header.without,
        "notes": [*prepared.notes, *prepared.collection.notes],
    }


def _show(collected: "Statistics", target: Path) -> None:
    from matsmerge.byte_sizes import format_bytes

    header = collected.header
    show_kinds(collected)
    display.stdout.print(
        f"{header.num_examples} examples of {header.data[0].name} in {target} "
        f"({format_bytes(target.stat().st_size)})",
        soft_wrap=True,
    )


def show_kinds(collected: "Statistics") -> None:
    """What there is of each kind, and what there is not."""
    from matsmerge.statistics.kinds import KINDS

    rows = []
    for kind in collected.kinds:
        lacking = collected.header.without.get(kind, {})
        reasons = sorted(set(lacking.values()) - set(KINDS[kind].expected_reasons))
        rows.append(
            (
                kind,
                f"{len(collected.parameters(kind)):,}",
                f"{len(lacking):,}",
                "; ".join(f"{sum(w == r for w in lacking.values())} {r}" for r in reasons),
            )
        )
    columns = ("statistic", "parameters with", "without", "why without")
    display.show_table(columns, rows)
