"""`mats train`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matsmerge.cli import display
from matsmerge.cli.field_options import takes_options_of, values_of
from matsmerge.cli.shared_options import RUNNING, AsJson, Quiet
from matsmerge.lab.training.training_options import TrainingOptions, make_options

if TYPE_CHECKING:
    from matsmerge.lab.training.training_run import Trained


@takes_options_of(TrainingOptions)
def train(
    model: Annotated[
        str,
        typer.Argument(
            help="Where to start: folder or hub id of a model, or a PEFT adapter's, which is then "
            "trained on.",
            metavar="MODEL",
        ),
    ],
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            "-t",
            help="Task file (YAML). Repeat it to train on several tasks jointly.",
            metavar="FILE",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to make.", metavar="FOLDER"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda or mps. Default: a GPU, if any.", rich_help_panel=RUNNING),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the folder.", rich_help_panel=RUNNING)
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue a run that was interrupted, from its last checkpoint.",
            rich_help_panel=RUNNING,
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Fine-tune a model on a task: AdamW with the paper's settings, the best checkpoint kept.

        mats train bert-base-uncased --task sst2.yaml --out tuned/sst2

    The baselines that are not merges. Joint training, one model for all tasks:

        mats train M --task sst2.yaml --task rte.yaml --out joint

    One task after another:

        mats train M --task mnli.yaml --out a

        mats train a --task rte.yaml --out b
    """
    from matsmerge.errors import RecipeError
    from matsmerge.lab.training.prepared_training import prepare
    from matsmerge.lab.training.run_folder import check_target
    from matsmerge.lab.training.training_run import check_device, run

    missing = [
        f"say {what} with {option}"
        for what, option, value in (
            ("what to train on", "--task FILE", task),
            ("where to write", "--out FOLDER", out),
        )
        if not value
    ]
    if missing:
        raise RecipeError(missing)
    assert out is not None
    chosen = make_options(**values_of(TrainingOptions, options))
    check_device(device)
    check_target(out, {}, overwrite=overwrite, resume=resume)
    silent = quiet or as_json
    with display.status(f"preparing {model}", quiet=silent):
        prepared = prepare(model, task or [], chosen)
    if not silent:
        display.show_notes(prepared.notes)
    with display.progress_bars(quiet=silent) as bars:
        trained = run(
            prepared, out, resume=resume, overwrite=overwrite, device=device, progress=bars
        )
    if as_json:
        print(json.dumps({"out": str(out), **trained.manifest}, indent=2))
    elif not quiet:
        _show(trained)


def _show(trained: "Trained") -> None:
    manifest: dict[str, Any] = trained.manifest
    tasks = [described["name"] for described in manifest["tasks"]]
    if manifest["checkpoints"]:
        rows = [
            (
                f"{c['step']}{' (kept)' if c['step'] == manifest['kept'] else ''}",
                "-" if c["training_loss"] is None else f"{c['training_loss']:.4f}",
                *(f"{c['scores'][name]:.4f}" for name in tasks),
                *([f"{c['score']:.4f}"] if len(tasks) > 1 else []),
            )
            for c in manifest["checkpoints"]
        ]
        measures = [f"{t['name']}, {t['measure']}" for t in manifest["tasks"]]
        average = ["mean"] if len(tasks) > 1 else []
        display.show_table(("batch", "training loss", *measures, *average), rows)
    early = ", stopped early" if manifest["stopped_early"] else ""
    display.stdout.print(
        f"{manifest['num_steps']} batches{early}; the state after batch {manifest['kept']} is in "
        f"{trained.folder}",
        soft_wrap=True,
    )
