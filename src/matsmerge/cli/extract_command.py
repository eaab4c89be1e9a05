"""`mats extract-lora`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from matsmerge.cli import display
from matsmerge.cli.shared_options import RUNNING, AsJson, Quiet
from matsmerge.limits import MOST_RANK


def extract_lora(
    model: Annotated[
        str, typer.Argument(help="A full model: folder, or hub id with an optional @revision.")
    ],
    base: Annotated[str, typer.Option(metavar="MODEL", help="The model it was fine-tuned from.")],
    rank: Annotated[int, typer.Option(min=1, max=MOST_RANK, help="Rank of the LoRA.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the adapter to.")],
    modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Modules to factor, e.g. '*.q_proj'. Repeatable. Default: all linear ones that "
            "changed.",
        ),
    ] = None,
    keep_rest: Annotated[
        bool,
        typer.Option(
            "--keep-rest",
            help="Bring what else changed whole: norms, embeddings (modules_to_save), biases.",
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="Dtype of the adapter. Default: the model's."),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an earlier adapter in the output folder.",
            rich_help_panel=RUNNING,
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Write the difference of two full models as a LoRA that PEFT loads.

        mats extract-lora finetuned --base pretrained --rank 32 --out lora

    Each layer's change is replaced by the nearest one of that rank (singular value
    decomposition); how much of it that keeps is shown, and in merge.json for each layer.
    """
    from matsmerge.checkpoints.source import local_path
    from matsmerge.engine.local_executor import LocalExecutor
    from matsmerge.engine.lora_extraction import prepare_extraction
    from matsmerge.engine.machine import keep_freed_memory
    from matsmerge.engine.merge_file import read_merge_file
    from matsmerge.engine.merge_run import merge_to_folder
    from matsmerge.engine.output_folder import MANIFEST, check_target

    target = local_path(out)
    check_target(target, 0, {}, overwrite=overwrite, resume=False)
    keep_freed_memory()
    with display.progress_bars(quiet=quiet or as_json) as bars:
        prepared = prepare_extraction(
            model,
            base,
            rank,
            modules=modules or (),
            keep_rest=keep_rest,
            dtype=dtype,
            progress=bars,
        )
        merge_to_folder(
            prepared,
            target,
            executor=LocalExecutor(fork=True),
            overwrite=overwrite,
            progress=bars,
        )
    layers = read_merge_file(target / MANIFEST)["lora"]
    if as_json:
        print(json.dumps({"out": str(target), "layers": layers, "notes": list(prepared.notes)}))
    elif not quiet:
        display.show_notes(prepared.notes)
        display.show_energies(layers)
        display.stdout.print(f"the LoRA is in {target}")
