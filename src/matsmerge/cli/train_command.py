"""`mats train`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TimeRemainingColumn,
)

from matsmerge.cli import display
from matsmerge.cli.options import RUNNING, AsJson, Quiet
from matsmerge.limits import MOST_AT_ONCE, MOST_COUNTED, MOST_RANK, NUM_SEEDS

if TYPE_CHECKING:
    from matsmerge.training.training import Trained

_ADAPTER = "Adapter"
_LENGTH = "Length and validation"
_OPTIMIZER = "Optimizer"


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
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Parameters that stay as they are, e.g. 'bert.embeddings.*'. Repeatable.",
        ),
    ] = None,
    fresh_head: Annotated[
        bool,
        typer.Option(
            "--fresh-head", help="A new head, even where the model's is for the same classes."
        ),
    ] = False,
    equal: Annotated[
        bool,
        typer.Option(
            "--equal", help="As many examples of each task, instead of in proportion to its size."
        ),
    ] = False,
    num_examples: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_COUNTED,
            help="Train on so many examples per task, drawn at random; 0: all.",
        ),
    ] = 0,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="full, ia3 or lora. Default: full; if MODEL is an adapter, that one.",
            rich_help_panel=_ADAPTER,
        ),
    ] = None,
    target_modules: Annotated[
        str | None,
        typer.Option(
            help="Where the adapter goes, e.g. q_proj,v_proj. Default: as PEFT has it for the "
            "architecture; (IA)^3: keys, values and the feed-forward, as in the paper.",
            metavar="NAMES",
            rich_help_panel=_ADAPTER,
        ),
    ] = None,
    feedforward_modules: Annotated[
        str | None,
        typer.Option(
            help="(IA)^3: which of them are scaled at their input. Default: as PEFT has it.",
            metavar="NAMES",
            rich_help_panel=_ADAPTER,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANK, help="Of LoRA. Default: 8.", rich_help_panel=_ADAPTER),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Of LoRA. Default: twice the rank.", rich_help_panel=_ADAPTER),
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_COUNTED, help="Batches at most. Default: 5000.", rich_help_panel=_LENGTH
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(help="Instead: times through the data, at most.", rich_help_panel=_LENGTH),
    ] = None,
    eval_every: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_COUNTED,
            help="Batches between checkpoints, each scored.",
            rich_help_panel=_LENGTH,
        ),
    ] = 100,
    patience: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_COUNTED,
            help="Stop after so many checkpoints without improvement; the best one is kept.",
            rich_help_panel=_LENGTH,
        ),
    ] = 5,
    num_validation: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_COUNTED,
            help="Score on so many examples per task, at most, drawn at random; 0: all.",
            rich_help_panel=_LENGTH,
        ),
    ] = 1000,
    no_validation: Annotated[
        bool,
        typer.Option(
            "--no-validation",
            help="Train to the end and keep the last state.",
            rich_help_panel=_LENGTH,
        ),
    ] = False,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate, constant. Default: 1e-4; (IA)^3: 5e-3.",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_AT_ONCE,
            help="Examples at once. The paper's batches have 1024: --accumulate 32.",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = 32,
    accumulate: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_COUNTED,
            help="Add up the gradients of so many, which then count as one batch.",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = 1,
    weight_decay: Annotated[
        float, typer.Option(help="Of AdamW.", rich_help_panel=_OPTIMIZER)
    ] = 0.0,
    max_grad_norm: Annotated[
        float,
        typer.Option(
            help="Larger gradients are scaled down; 0: never.", rich_help_panel=_OPTIMIZER
        ),
    ] = 1.0,
    loss: Annotated[
        str,
        typer.Option(
            help="-log p(y|x) as the mean or the sum over the tokens of y.",
            rich_help_panel=_OPTIMIZER,
        ),
    ] = "mean",
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=NUM_SEEDS - 1, help="Of everything random.", rich_help_panel=_OPTIMIZER
        ),
    ] = 0,
    bf16: Annotated[
        bool,
        typer.Option(
            "--bf16",
            help="Compute in bfloat16, the weights staying as they are.",
            rich_help_panel=RUNNING,
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the weights. Default: as stored, in a full model at least float32.",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    group_by_length: Annotated[
        bool,
        typer.Option(
            "--group-by-length",
            help="Batches of examples of similar length, with less padding.",
            rich_help_panel=RUNNING,
        ),
    ] = False,
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
    from matsmerge.training.options import make_options
    from matsmerge.training.preparing import prepare
    from matsmerge.training.training import check_device, check_output, run

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
    options = make_options(
        adapter=adapter,
        target_modules=_names(target_modules),
        feedforward_modules=_names(feedforward_modules),
        rank=rank,
        alpha=alpha,
        learning_rate=lr,
        batch_size=batch_size,
        accumulate=accumulate,
        max_steps=max_steps,
        epochs=epochs,
        eval_every=eval_every,
        patience=patience,
        validate=not no_validation,
        num_validation=num_validation or None,
        num_examples=num_examples or None,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        loss=loss,
        seed=seed,
        bf16=bf16,
        dtype=dtype,
        group_by_length=group_by_length,
        equal=equal,
        freeze=freeze or [],
        fresh_head=fresh_head,
    )
    check_device(device)
    check_output(out, overwrite=overwrite, resume=resume)
    silent = quiet or as_json
    with display.status(f"preparing {model}", quiet=silent):
        prepared = prepare(model, task or [], options)
    if not silent:
        display.show_notes(prepared.notes)
    with _bar(quiet=silent) as bar:
        trained = run(
            prepared, out, resume=resume, overwrite=overwrite, device=device, progress=bar
        )
    if as_json:
        print(json.dumps({"out": str(out), **trained.manifest}, indent=2))
    elif not quiet:
        _show(trained)


class _Bar:
    """How many batches are done, the loss of the last one and the scores so far."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None
        self._best = ""

    def begin(self, num_steps: int, first: int) -> None:
        self._task = self._bars.add_task("training", total=num_steps, completed=first, said="")

    def step(self, number: int, loss: float) -> None:
        assert self._task is not None
        self._bars.update(self._task, completed=number, said=f"loss {loss:.3f}{self._best}")

    def checkpoint(self, number: int, score: float | None, is_best: bool) -> None:
        if score is not None and is_best:
            self._best = f", best {score:.4f} at {number}"


@contextmanager
def _bar(*, quiet: bool) -> Iterator[_Bar]:
    columns = (
        display.PlainColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        display.PlainColumn("batches"),
        display.PlainColumn("{task.fields[said]}"),
        display.PlainColumn("left at most"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=display.stderr, disable=quiet) as bars:
        yield _Bar(bars)


def _names(text: str | None) -> list[str] | None:
    """`["q", "v"]` from `"q,v"`."""
    if text is None:
        return None
    return [name.strip() for name in text.split(",") if name.strip()]


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
