"""The options of `mats merge` that are its own; those of methods are in `method_flags`."""

from pathlib import Path

from matsmerge.cli.field_options import CommandOptions, argument, option
from matsmerge.cli.shared_options import Execution, Resuming
from matsmerge.limits import MOST_COUNTED, MOST_PADDED


class General(CommandOptions):
    """Options that recipes and methods of all kinds have."""

    given: list[str] = argument([], metavar="[RECIPE | MODEL...]")
    """A recipe file (YAML), ours or mergekit's; or the models to merge, as with --model."""

    out: Path | None = option(short="-o", metavar="FOLDER")
    """Folder to write the merged model to, here or in a store (s3://BUCKET/NAME)."""

    heads: list[str] = option([], metavar="PATTERN")
    """Pattern of parameters that belong to one task alone, e.g. 'classifier.*': kept per model in
    heads/, not merged. Repeatable; adds to the recipe's."""

    match_heads: bool | None = None
    """Match each model's head to the merged model, on its data (--data) without labels. Default:
    with mats_cross."""

    tokenizer: str | None = option(metavar="SOURCE")
    """Bring embeddings of different vocabularies together: union of all tokens, base, or a MODEL
    whose tokenizer to take. Default: those of all models must agree; base with the two below."""

    pad_to_multiple_of: int | None = option(ge=1, le=MOST_PADDED)
    """Rows are added to embeddings until this divides their number."""

    token: list[str] = option([], metavar="TOKEN=MODEL")
    """Models that lack a token see MODEL's row of it; or, for MODEL, `mean` of all that have it, or
    `zero`. Repeatable."""

    ignore_tokenizers: bool = False
    """Merge models whose tokenizers give tokens different ids all the same."""

    allow_nonfinite: bool = False
    """Go on where an input holds NaN or Inf."""


class WithoutFile(CommandOptions):
    """What a recipe file says otherwise."""

    panel = "Without a recipe file"

    model: list[str] = option([], metavar="MODEL")
    """A model: file, folder, URL, or hub id with an optional @revision; NAME=MODEL to name it.
    Repeat for each."""

    base: str | None = option(metavar="MODEL")
    """The model they were fine-tuned from."""

    weight: list[float] = option([], metavar="NUMBER")
    """How much a model counts, in the order of the models. Repeat for each."""

    statistics: list[str] = option([], metavar="FILE")
    """What `mats collect` wrote, in the order of the models. Repeat for each. Default:
    statistics.safetensors beside each model."""

    data: list[str] = option([], metavar="FILE")
    """A model's data, or a task file (.yaml) that names it, for --inputs merged and regmean++; in
    the order of the models. Repeat for each."""

    set_: list[str] = option([], flag="--set", metavar="NAME=VALUE")
    """An option of the method or of one of its parts: scale=0.3, objective.ridge=0.1,
    init.scale=[0.2,0.5]. Repeatable. Most have a flag of their own, below."""


class Solving(CommandOptions):
    """What concerns methods that solve linear systems."""

    panel = "Solving linear systems (mats and its kin)"

    trajectory: str | None = option(metavar="LIST")
    """Write a model for each of these iterations, from one run: 10,20,50 or 10:100:10. They go to
    OUT/iteration-N."""

    trace: Path | None = option(metavar="FILE")
    """Write residual and objective of every layer and iteration (JSON lines)."""

    force: bool = False
    """Use statistics that were collected from another model."""


class OutputFiles(CommandOptions):
    """What is written."""

    panel = "Output"

    dtype: str | None = option(metavar="DTYPE")
    """Dtype of the output: float32, bfloat16, float16, float64, fp8 as an input is, or widest, that
    holds all inputs' values. Default: the inputs', bfloat16 for those in FP8."""

    shard_size: str = option("5GB", metavar="SIZE")
    """Largest file to write."""

    intermediates: Path | None = option(metavar="FOLDER")
    """Of a recipe of several documents: folder to keep the other results in. Default: they are
    deleted at the end."""

    push: str | None = option(metavar="OWNER/NAME")
    """Publish the merged model on the hub when it is complete; private, unless --public."""

    public: bool = False
    """Let everyone see what is pushed."""


class Adapters(CommandOptions):
    """What concerns adapters."""

    panel = "Adapters (PEFT)"

    output: str | None = option(metavar="KIND")
    """dense: a full model; adapter: a LoRA or (IA)^3 adapter. Default: an adapter if all models are
    adapters of one kind."""

    rank: str | None = option(metavar="NUMBER")
    """Rank of the LoRA to write, or `concatenate` for the exact sum (average, task_arithmetic).
    Default: the sum of the adapters' ranks."""

    align: str | None = option(metavar="NAME")
    """Merge LoRA adapters in a space they share. knots: that of their outputs (ties, dare_*);
    core_space: that of their outputs and inputs (tsv_m and iso_c too)."""


class MergeRunOptions(Execution, Resuming):
    """How it runs."""

    dry_run: bool = False
    """Check everything, show the plan, write nothing."""

    verify: bool = False
    """Compare every byte of the inputs before and after the merge, and when it is resumed.
    Otherwise their sizes, times and inodes are compared."""

    max_memory: str | None = option(metavar="SIZE")
    """Memory to use beyond the interpreter's own, e.g. 2GB; on each GPU, if it merges on
    those. Default: half of what is free, and what GPUs have."""

    device: str | None = option(metavar="NAME")
    """What to merge on: cpu, cuda (all GPUs), cuda:1, mps, or auto, a GPU if there is one. Default:
    the recipe's, or cpu."""

    workers: int | None = option(ge=1, le=MOST_COUNTED)
    """Jobs at once. Default: all cores."""
