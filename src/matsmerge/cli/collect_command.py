"""`mats collect`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matsmerge.byte_sizes import parse_bytes
from matsmerge.cli.collected_display import show_next_merge
from matsmerge.cli.collection_work import CollectionWork, collect_on
from matsmerge.cli.display import JsonScreen
from matsmerge.cli.field_options import RUNNING, CommandOptions, argument, option, takes_options
from matsmerge.cli.shared_options import Batches, Execution, Resuming, parse_pairs
from matsmerge.errors import CheckpointError, DataError, MatsError, RecipeError, closest
from matsmerge.limits import MOST_AT_ONCE, MOST_COUNTED, MOST_SAMPLES, NUM_SEEDS
from matsmerge.problems import noted
from matsmerge.statistics.ranks import RANK_UNLESS_GIVEN

if TYPE_CHECKING:
    from matsmerge.data.rows import Data
    from matsmerge.tasks.task_file import TaskFile


class ModelOptions(CommandOptions):
    """Of which models, and where the statistics go."""

    models: list[str] = argument(metavar="MODEL...")
    """A model: folder or hub id, or a PEFT adapter's. Of several adapters on one base, the base is
    loaded once."""

    out: list[Path] = option([], short="-o", metavar="FILE")
    """File to write, NAME.safetensors; repeat for each model. Default: statistics.safetensors in
    the model's folder, where `mats merge` finds it."""

    dtype: str = "auto"
    """Of the file: auto (sketches in 8 bits, all else float32), float32, bfloat16 (half the
    size, 3 digits), float64."""


class Collected(CommandOptions):
    """What to collect: fields of `CollectionOptions`, for which torch would be imported."""

    statistics: str = option("gram", metavar="KINDS")
    """Kinds, separated by commas: gram (RegMean, MaTS), kfac (block Fisher of linear layers),
    fisher (diagonal), block_fisher (of vectors, as in (IA)^3)."""

    rank: str = option(RANK_UNLESS_GIVEN, metavar="R")
    """Leading directions that gram and kfac keep of second moments, as sketches: files of a few
    percent of the model's size. full: whole matrices. auto: 128, or these if they are as small."""

    fisher: str = "empirical"
    """empirical: gradients for the given answers. true: for answers as likely as the model finds
    them; exact for two classes or choices (--num-samples: for more), else by random signs."""

    reduction: str = option("sum", flag="--loss")
    """log p(y|x) as the sum or the mean over the tokens of y."""

    num_samples: int = option(1, ge=1, le=MOST_SAMPLES)
    """Passes back for the true Fisher of an example. For one class more it is exact; otherwise each
    pass draws random signs anew."""

    parameters: list[str] = option([], metavar="PATTERN")
    """Only parameters that match, e.g. 'encoder.*'. Repeatable. Default: all; of adapters, what one
    of them changes."""

    held_out: float = 0.0
    """Share of the examples for a second set, kept apart, by which iterations can be chosen without
    labels."""

    bias: bool = option(True, flag="--no-bias")
    """Do not keep the mean inputs that joining biases needs."""

    seed: int = option(0, ge=1 - NUM_SEEDS, lt=NUM_SEEDS)
    """Of everything random."""


class ExampleOptions(CommandOptions):
    """Which examples to use."""

    panel = "Data"

    data: list[str] = option([], metavar="FILE")
    """JSONL, CSV, TSV (also .gz) or Parquet file, a folder saved by datasets or of images, or a
    dataset on the hub. Repeat for each model."""

    num_examples: int | None = option(1000, zero=True, ge=1, le=MOST_COUNTED)
    """The first so many examples; 0: all."""

    shuffle: bool = False
    """Examples at random, not the first."""

    columns: str | None = option(metavar="NAMES")
    """Which columns are meant, e.g. text=sentence,label=gold. Classification has text, text_pair,
    label; tokens, labels for words; image, label for images; seq2seq and language models input,
    target (or text alone, or messages); multiple choice input, choices, label."""

    split: str | None = None
    """Of a dataset with several."""

    max_length: int | None = option(ge=1, le=MOST_AT_ONCE)
    """Tokens to cut texts to. Default: what the model takes, at most 512."""


class LoadingOptions(CommandOptions):
    """How models are loaded."""

    panel = "Model"

    task: list[str] = option([])
    """sequence_classification, token_classification, seq2seq, causal_lm, multiple_choice,
    image_classification, or a task file (YAML) that says this and what the options here say; repeat
    for each model, or one for all. Default: by the model."""

    head: str | None = option(metavar="FILE")
    """File with the head's parameters, for a model stored without."""

    tokenizer: str | None = None
    """Folder with the tokenizer, if not the model's."""

    model_dtype: str | None = None
    """Dtype to run the model in. Default: as stored."""

    device: str | None = None
    """cpu, cuda, cuda:1, ..."""

    device_map: str | None = None
    """'auto' spreads a model over all devices, memory and disk."""


class LimitOptions(CommandOptions):
    """What it may take."""

    panel = RUNNING

    max_memory: str | None = option(metavar="SIZE")
    """Memory to use beyond the interpreter's own, e.g. 2GB. A model that does not fit is loaded and
    run block after block. Default: all that it takes with all of the model in memory."""

    parts: int = option(1, ge=1, le=MOST_AT_ONCE)
    """With --executor ray: parts of each model's data, each a task, that are added up."""

    dry_run: bool = False
    """Check everything, say what it would take, collect nothing."""


@takes_options
def collect(
    given: ModelOptions,
    collected: Collected,
    examples: ExampleOptions,
    loading: LoadingOptions,
    batches: Batches,
    earlier: Resuming,
    limits: LimitOptions,
    running: Execution,
    screen: JsonScreen,
) -> None:
    """Measure what a model does on its data, once, into one file that others can merge with.

        mats collect tuned/sst2 --data sst2.jsonl --statistics gram,fisher

    Several adapters on one base, each with its data; each file goes into the adapter's folder:

        mats collect lora/a lora/b --data a.jsonl --data b.jsonl --statistics kfac

    With several processes: torchrun --nproc-per-node 4 -m matsmerge collect ...

    On a Ray cluster, one model a task, or one of --parts of its data:

        mats collect A B C --data a.jsonl --data b.jsonl --data c.jsonl --executor ray
    """
    from matsmerge.statistics.collection_options import make_collection_options
    from matsmerge.statistics.collection_run import Output, check_output
    from matsmerge.statistics.processes import Process, join_processes
    from matsmerge.statistics.statistics_file import parse_dtype

    on_ray = running.on_ray()
    process = join_processes()
    if on_ray is not None and process.num_processes > 1:
        raise RecipeError("give either --executor ray, or several processes by torchrun")
    if not process.is_first:
        screen = JsonScreen(quiet=True)
    options = make_collection_options(
        **dict(collected) | {"parameters": collected.parameters or ["*"]}
    )
    parse_dtype(given.dtype)
    models, targets = given.models, _targets(given)
    num = limits.parts
    parts = [Process(rank, num) for rank in range(num)] if num > 1 else []
    if parts:
        _check_parts(targets, is_on_ray=on_ray is not None)
    problems: list[str] = []
    for target in targets:
        with noted(problems):
            check_output(target, **dict(earlier), may_be_finished=earlier.resume, parts=parts)
    with noted(problems):
        asked = _asked(len(models), examples, loading)
    MatsError.raise_all(problems)
    device = loading.device
    if process.num_processes > 1 and device is None and loading.device_map is None:
        device = _own_device()
    also, adapters = _changed_by_adapters(models)
    max_bytes = parse_bytes(limits.max_memory) if limits.max_memory else None
    if max_bytes is not None or limits.dry_run:
        _check_limits(models, loading)
    work = CollectionWork(
        models=models,
        outputs=[Output(target, given.dtype, **dict(earlier)) for target in targets],
        asked=asked,
        options=options,
        parameters=collected.parameters or also,
        choice={
            "num_examples": examples.num_examples,
            "shuffle": examples.shuffle,
            **dict(batches),
        },
        dtype=loading.model_dtype,
        device=device,
        device_map=loading.device_map,
        max_bytes=max_bytes,
    )
    if len(models) > 1:
        work.check(screen, adapters)
    if limits.dry_run:
        reports = [work.describe(i, screen) for i in range(len(models))]
    elif on_ray is not None:
        reports = collect_on(on_ray, work, screen, parts or [None])
    else:
        reports = [work.collect(i, screen) for i in range(len(models))]
    if process.is_first:
        screen.result(reports if len(models) > 1 else reports[0])
        if not limits.dry_run:
            show_next_merge(models, given.out, [k.name for k in options.collected], screen)


def _check_parts(targets: list[Path], *, is_on_ray: bool) -> None:
    """Refuse parts of the data that nobody collects, or that their files cannot be kept of."""
    from matsmerge.files.remote_names import url_of

    if not is_on_ray:
        raise RecipeError(
            "--parts: is for --executor ray; on this machine use torchrun --nproc-per-node"
        )
    RecipeError.raise_all(
        f"{url_of(target)}: parts of the data are added up beside the output; with --parts write "
        "to a folder that all nodes see, and copy the file"
        for target in targets
        if url_of(target)
    )


def _check_limits(models: list[str], loading: LoadingOptions) -> None:
    """Refuse limits where all of a model is loaded, or it is spread in another way."""
    from matsmerge.adapters.adapter_folder import read_adapter
    from matsmerge.checkpoints.source import open_checkpoint

    if loading.device_map is not None:
        raise RecipeError("give either --device-map, or --max-memory and --dry-run")
    RecipeError.raise_all(
        f"{model}: is an adapter, whose base is loaded as a whole; leave --max-memory and "
        "--dry-run away, or collect from the merged model"
        for model in models
        if read_adapter(open_checkpoint(model)) is not None
    )


def _targets(given: ModelOptions) -> list[Path]:
    """Where to write the statistics of each model."""
    from matsmerge.checkpoints.source import local_path
    from matsmerge.files.guarded_files import reading
    from matsmerge.files.mirror import fetch_path
    from matsmerge.statistics.statistics_file import BESIDE

    models, out = given.models, given.out
    if not out:
        folders = [local_path(model) for model in models]
        for folder in folders:
            with reading(folder, CheckpointError):
                fetch_path(folder)
        elsewhere = [str(f) for f in folders if not f.is_dir()]
        if elsewhere:
            raise RecipeError(
                [f"{name}: is no folder; say where to write with --out" for name in elsewhere]
            )
        return [folder / BESIDE for folder in folders]
    if len(out) != len(models):
        raise RecipeError(f"{len(out)} times --out for {len(models)} models; give one for each")
    if len({path.resolve() for path in out}) < len(out):
        raise RecipeError("two models would be written to the same --out; give each its own")
    return out


def _asked(
    num_models: int, examples: ExampleOptions, loading: LoadingOptions
) -> "list[tuple[TaskFile, Data]]":
    """What each model is asked, and its data."""
    from matsmerge.tasks.splits import read_split

    tasks: list[str | None] = [*loading.task] or [None]
    data: list[str | None] = [*examples.data] or [None]
    for flag, values in (("--task", tasks), ("--data", data)):
        if len(values) not in (1, num_models):
            raise RecipeError(
                f"{len(values)} times {flag} for {num_models} models; give one for each, or one "
                "for all"
            )
    given = {key: getattr(examples, key) for key in ("split", "columns", "max_length")}
    given |= {key: getattr(loading, key) for key in ("head", "tokenizer")}
    asked = []
    problems: list[str] = []
    for i in range(num_models):
        with noted(problems):
            described = _task_file(tasks[i % len(tasks)], given | {"data": data[i % len(data)]})
            if described.data is None:
                raise DataError("say which data to use with --data FILE")
            asked.append((described, read_split(described)))
    MatsError.raise_all(problems)
    return asked


def _changed_by_adapters(models: list[str]) -> tuple[list[str], set[str]]:
    """Weights that some of several LoRAs changes, and which models are adapters.

    To merge LoRAs that change different weights, statistics of all of these are needed.
    """
    from matsmerge.adapters.adapter_folder import read_adapter
    from matsmerge.checkpoints.source import open_checkpoint

    opened = {model: read_adapter(open_checkpoint(model)) for model in models}
    adapters = {model: adapter for model, adapter in opened.items() if adapter is not None}
    weights = {w: None for a in adapters.values() if a.kind.is_folded for w in a.weights}
    return list(weights), {*adapters}


def _task_file(task: str | None, given: dict[str, Any]) -> "TaskFile":
    """What a task file says, and options over it."""
    from matsmerge.tasks.kinds import TASKS
    from matsmerge.tasks.task_file import TaskFile, read_task_file

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
        names = changes["columns"].split(",")
        given_names = parse_pairs("--columns", names, "names as in text=sentence,label=gold")
        changes["columns"] = {**described.columns, **given_names}
    return described.model_copy(update=changes)


def _own_device() -> str | None:
    """The device of one of several processes on a machine."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else None
