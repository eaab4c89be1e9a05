"""The options of `mats merge` that are its own; those of methods are in `method_flags`."""

from pathlib import Path
from typing import Annotated

import typer

from matsmerge.cli.shared_options import RUNNING, option
from matsmerge.limits import MOST_COUNTED

WITHOUT_FILE = "Without a recipe file"
SOLVING = "Solving linear systems (mats and its kin)"
_OUTPUT = "Output"
_ADAPTERS = "Adapters (PEFT)"

RecipeFile = Annotated[
    Path | None,
    typer.Argument(help="A recipe file (YAML), ours or mergekit's.", show_default=False),
]
Out = Annotated[Path | None, option("Folder to write the merged model to.", "--out", "-o")]

# What to merge, and how
Models = Annotated[
    list[str] | None,
    option(
        "A model: file, folder, or hub id with an optional @revision. Repeat for each.",
        metavar="MODEL",
        panel=WITHOUT_FILE,
    ),
]
Base = Annotated[
    str | None,
    option("The model they were fine-tuned from.", metavar="MODEL", panel=WITHOUT_FILE),
]
Weights = Annotated[
    list[float] | None,
    option(
        "How much a model counts, in the order of the models. Repeat for each.",
        metavar="NUMBER",
        panel=WITHOUT_FILE,
    ),
]
Statistics = Annotated[
    list[str] | None,
    option(
        "What `mats collect` wrote, in the order of the models. Repeat for each. Default: "
        "statistics.safetensors beside each model.",
        metavar="FILE",
        panel=WITHOUT_FILE,
    ),
]
Data = Annotated[
    list[str] | None,
    option(
        "A model's data, or a task file (.yaml) that names it, for --inputs merged and "
        "regmean++; in the order of the models. Repeat for each.",
        metavar="FILE",
        panel=WITHOUT_FILE,
    ),
]
Assignments = Annotated[
    list[str] | None,
    option(
        "An option of the method or of one of its parts: scale=0.3, objective.ridge=0.1, "
        "init.scale=[0.2,0.5]. Repeatable. Most have a flag of their own, below.",
        "--set",
        metavar="NAME=VALUE",
        panel=WITHOUT_FILE,
    ),
]
Trajectory = Annotated[
    str | None,
    option(
        # With the backslash, 100 between colons is no emoji.
        "Write a model for each of these iterations, from one run: 10,20,50 or 10:100\\:10. They "
        "go to OUT/iteration-N.",
        metavar="LIST",
        panel=SOLVING,
    ),
]
Trace = Annotated[
    Path | None,
    option(
        "Write residual and objective of every layer and iteration (JSON lines).",
        metavar="FILE",
        panel=SOLVING,
    ),
]
Force = Annotated[
    bool,
    option("Use statistics that were collected from another model.", "--force", panel=SOLVING),
]
Heads = Annotated[
    list[str] | None,
    option(
        "Pattern of parameters that belong to one task alone, e.g. 'classifier.*': kept per model "
        "in heads/, not merged. Repeatable; adds to the recipe's.",
        metavar="PATTERN",
    ),
]
IgnoreTokenizers = Annotated[
    bool,
    option(
        "Merge models whose tokenizers give tokens different ids all the same.",
        "--ignore-tokenizers",
    ),
]
AllowNonfinite = Annotated[
    bool, option("Go on where an input holds NaN or Inf.", "--allow-nonfinite")
]

# What becomes of it
Dtype = Annotated[
    str | None,
    option(
        "Dtype of the output: float32, bfloat16, float16, float64. Default: the inputs'.",
        metavar="DTYPE",
        panel=_OUTPUT,
    ),
]
ShardSize = Annotated[str, option("Largest file to write.", metavar="SIZE", panel=_OUTPUT)]
Overwrite = Annotated[
    bool,
    option("Replace an earlier merge in the output folder.", "--overwrite", panel=_OUTPUT),
]
OutputKind = Annotated[
    str | None,
    option(
        "dense: a full model; adapter: a LoRA or (IA)^3 adapter. Default: an adapter if all models "
        "are adapters of one kind.",
        metavar="KIND",
        panel=_ADAPTERS,
    ),
]
Rank = Annotated[
    str | None,
    option(
        "Rank of the LoRA to write, or `concatenate` for the exact sum (average, "
        "task_arithmetic). Default: the sum of the adapters' ranks.",
        metavar="NUMBER",
        panel=_ADAPTERS,
    ),
]
Align = Annotated[
    str | None,
    option(
        "knots: merge LoRA adapters in the space their outputs share (ties, dare_*).",
        metavar="NAME",
        panel=_ADAPTERS,
    ),
]

# How it runs
DryRun = Annotated[
    bool,
    option("Check everything, show the plan, write nothing.", "--dry-run", panel=RUNNING),
]
Resume = Annotated[
    bool, option("Continue a merge that was interrupted.", "--resume", panel=RUNNING)
]
Verify = Annotated[
    bool,
    option(
        "Compare every byte of the inputs before and after the merge, and when it is resumed. "
        "Otherwise their sizes, times and inodes are compared.",
        "--verify",
        panel=RUNNING,
    ),
]
MaxMemory = Annotated[
    str | None,
    option(
        "Memory to use beyond the interpreter's own, e.g. 2GB. Default: half of what is free.",
        metavar="SIZE",
        panel=RUNNING,
    ),
]
Workers = Annotated[
    int | None,
    option("Jobs at once. Default: all cores.", min=1, max=MOST_COUNTED, panel=RUNNING),
]
