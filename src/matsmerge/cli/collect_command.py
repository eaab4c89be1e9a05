"""`mats collect`."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matsmerge.cli import display

if TYPE_CHECKING:
    from matsmerge.statistics.data_collecting import PreparedCollection
    from matsmerge.statistics.statistics import Statistics
    from matsmerge.tasks.task_file import TaskFile

_DATA = "Data"
_MODEL = "Model"
_RUNNING = "Running"


def collect(
    model: Annotated[
        str, typer.Argument(help="A model: folder or hub id, or a PEFT adapter's.", metavar="MODEL")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write, NAME.safetensors.", metavar="FILE")
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="JSONL, CSV, TSV (also .gz) or Parquet file, a folder saved by datasets or of "
            "images, or a dataset on the hub.",
            metavar="FILE",
            rich_help_panel=_DATA,
        ),
    ] = None,
    statistics: Annotated[
        str,
        typer.Option(
            help="Kinds, separated by commas: gram (RegMean, MaTS), kfac (block Fisher of linear "
            "layers), fisher (diagonal), block_fisher (of vectors, as in (IA)^3).",
            metavar="KINDS",
        ),
    ] = "gram",
    fisher: Annotated[
        str,
        typer.Option(
            help="empirical: gradients for the given answers. true: for answers as likely as the "
            "model finds them; summed over up to 32 classes or choices, else drawn.",
        ),
    ] = "empirical",
    loss: Annotated[
        str, typer.Option(help="log p(y|x) as the sum or the mean over the tokens of y.")
    ] = "sum",
    num_samples: Annotated[
        int, typer.Option(help="Answers drawn per example, where the true Fisher is sampled.")
    ] = 1,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Only parameters that match, e.g. 'encoder.*'. Repeatable.",
        ),
    ] = None,
    held_out: Annotated[
        float,
        typer.Option(
            help="Share of the examples for a second set, kept apart, by which iterations can be "
            "chosen without labels."
        ),
    ] = 0.0,
    no_bias: Annotated[
        bool,
        typer.Option("--no-bias", help="Do not keep the mean inputs that joining biases needs."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    dtype: Annotated[
        str,
        typer.Option(help="Of the file: float32, bfloat16 (half the size, 3 digits), float64."),
    ] = "float32",
    num_examples: Annotated[
        int,
        typer.Option(min=0, help="The first so many examples; 0: all.", rich_help_panel=_DATA),
    ] = 1000,
    shuffle: Annotated[
        bool,
        typer.Option("--shuffle", help="Examples at random, not the first.", rich_help_panel=_DATA),
    ] = False,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Which columns are meant, e.g. text=sentence,label=gold. Classification has "
            "text, text_pair, label; tokens, labels for words; image, label for images; seq2seq "
            "and language models input, target (or text alone); multiple choice input, choices, "
            "label.",
            metavar="NAMES",
            rich_help_panel=_DATA,
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Of a dataset with several.", rich_help_panel=_DATA)
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens to cut texts to. Default: what the model takes, at most 512.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="sequence_classification, token_classification, seq2seq, causal_lm, "
            "multiple_choice, image_classification, or a task file (YAML) that says this and "
            "what the options here say. Default: by the model.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="File with the head's parameters, for a model stored without.",
            metavar="FILE",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder with the tokenizer, if not the model's.", rich_help_panel=_MODEL),
    ] = None,
    model_dtype: Annotated[
        str | None,
        typer.Option(help="Dtype to run the model in. Default: as stored.", rich_help_panel=_MODEL),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...", rich_help_panel=_MODEL)
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(
            help="'auto' spreads a model over all devices, memory and disk.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Examples at once, at most.", rich_help_panel=_RUNNING)
    ] = 32,
    max_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens at once, at most, with padding.", rich_help_panel=_RUNNING
        ),
    ] = 4096,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file.", rich_help_panel=_RUNNING)
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue a collection that was interrupted.", rich_help_panel=_RUNNING
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show errors only.", rich_help_panel=_RUNNING)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_RUNNING)
    ] = False,
) -> None:
    """Measure what a model does on its data, once, into one file that others can merge with.

        mats collect tuned/sst2 --data sst2.jsonl --statistics gram,fisher --out sst2.safetensors

    With several processes: torchrun --nproc-per-node 4 -m matsmerge collect ...
    """
    from matsmerge.checkpoints.opening import local_path
    from matsmerge.errors import DataError
    from matsmerge.statistics.collecting import Output, check_output
    from matsmerge.statistics.data_collecting import Choice, prepare
    from matsmerge.statistics.options import make_options
    from matsmerge.statistics.processes import join_processes
    from matsmerge.statistics.statistics_file import parse_dtype
    from matsmerge.tasks.data import read_data
    from matsmerge.tasks.model_loading import load_model

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
    target = local_path(out)
    check_output(target, overwrite=overwrite, resume=resume)
    asked = _task_file(
        task,
        {
            "data": data,
            "split": split,
            "columns": columns,
            "max_length": max_length,
            "head": head,
            "tokenizer": tokenizer,
        },
    )
    if asked.data is None:
        raise DataError("say which data to use with --data FILE")
    rows = read_data(asked.data, split=asked.split)
    if process.num_processes > 1 and device is None and device_map is None:
        device = _own_device()
    with display.status("loading the model", quiet=quiet or as_json):
        loaded = load_model(
            model,
            task=asked.task,
            head=asked.head,
            tokenizer=asked.tokenizer,
            options=asked.options(need_targets=options.wants_targets),
            dtype=model_dtype,
            device=device,
            device_map=device_map,
        )
    choice = Choice(
        num_examples or None, shuffle, asked.columns, asked.template, batch_size, max_tokens
    )
    prepared = prepare(loaded, rows, options, choice)
    if not quiet and not as_json:
        display.show_notes(prepared.notes)
    with display.example_bar(prepared.num_examples, quiet=quiet or as_json) as bar:
        collected = prepared.run(Output(target, dtype, resume=resume), bar)
    if not quiet and not as_json:
        display.show_notes(prepared.collection.notes)
    if process.is_first:
        _report(prepared, collected, target, quiet=quiet, as_json=as_json)


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


def _report(
    prepared: "PreparedCollection",
    collected: "Statistics",
    target: Path,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    from matsmerge.engine.machine import format_bytes

    header = collected.header
    size = target.stat().st_size
    if as_json:
        content = {
            "out": str(target),
            "num_bytes": size,
            "model": header.model.model_dump(),
            "data": [origin.model_dump() for origin in header.data],
            "sets": {name: s.num_examples for name, s in header.sets.items()},
            "num_maps": len(header.maps),
            "num_grams": len({m.inputs for m in header.maps if m.inputs is not None}),
            "parameters": {kind: len(collected.parameters(kind)) for kind in collected.kinds},
            "without": header.without,
            "notes": [*prepared.notes, *prepared.collection.notes],
        }
        print(json.dumps(content, indent=2))
    elif not quiet:
        show_kinds(collected)
        display.stdout.print(
            f"{header.num_examples} examples of {header.data[0].name} in {target} "
            f"({format_bytes(size)})",
            markup=False,
            soft_wrap=True,
        )


def show_kinds(collected: "Statistics") -> None:
    """What there is of each kind, and what there is not."""
    rows = []
    for kind in collected.kinds:
        lacking = collected.header.without.get(kind, {})
        reasons = sorted({why for why in lacking.values() if why != "not a vector"})
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
