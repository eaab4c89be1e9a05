"""`mats train`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matsmerge.cli.display import JsonScreen, Screen
from matsmerge.cli.field_options import RUNNING, CommandOptions, argument, option, takes_options
from matsmerge.cli.shared_options import Resuming
from matsmerge.errors import RecipeError
from matsmerge.lab.training.training_options import TrainingOptions

if TYPE_CHECKING:
    from matsmerge.lab.training.training_run import Trained


class TrainingRun(CommandOptions):
    """What to train, what on, where to, and how."""

    model: str = argument(metavar="MODEL")
    """Where to start: folder or hub id of a model, or a PEFT adapter's, which is then trained
    on."""

    task: list[str] = option([], short="-t", metavar="FILE")
    """Task file (YAML). Repeat it to train on several tasks jointly."""

    out: Path | None = option(short="-o", metavar="FOLDER")
    """Folder to make."""

    device: str | None = option(panel=RUNNING)
    """cpu, cuda or mps. Default: a GPU, if any."""


@takes_options
def train(
    asked: TrainingRun, options: TrainingOptions, earlier: Resuming, screen: JsonScreen
) -> None:
    """Fine-tune a model on a task: AdamW with the paper's settings, the best checkpoint kept.

        mats train bert-base-uncased --task sst2.yaml --out tuned/sst2

    The baselines that are not merges. Joint training, one model for all tasks:

        mats train M --task sst2.yaml --task rte.yaml --out joint

    One task after another:

        mats train M --task mnli.yaml --out a

        mats train a --task rte.yaml --out b
    """
    from matsmerge.lab.training.prepared_training import prepare_training
    from matsmerge.lab.training.run_folder import RunFolder
    from matsmerge.lab.training.training_run import check_device, run_training

    missing = [
        f"say {what} with {option}"
        for what, option, value in (
            ("what to train on", "--task FILE", asked.task),
            ("where to write", "--out FOLDER", asked.out),
        )
        if not value
    ]
    if missing:
        raise RecipeError(missing)
    assert asked.out is not None
    folder = RunFolder(asked.out, **dict(earlier))
    check_device(asked.device)
    folder.check()
    with screen.status(f"preparing {asked.model}"):
        prepared = prepare_training(asked.model, asked.task, options)
    screen.notes(prepared.notes)
    with screen.bars() as bars:
        trained = run_training(prepared, folder, asked.device, bars)
    screen.result({"out": str(asked.out), **trained.manifest})
    _show(trained, screen)
    tasks = shlex.join(f"--task={path}" for path in asked.task)
    place = shlex.quote(str(trained.folder))
    screen.next(f"mats collect {place} {tasks} --split train --statistics kfac")


def _show(trained: "Trained", screen: Screen) -> None:
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
        screen.table(("batch", "training loss", *measures, *average), rows)
    early = ", stopped early" if manifest["stopped_early"] else ""
    screen.say(
        f"{manifest['num_steps']} batches{early}; the state after batch {manifest['kept']} is in "
        f"{trained.folder}"
    )
    kept = next((c for c in manifest["checkpoints"] if c["step"] == manifest["kept"]), None)
    if kept is not None:
        measure = manifest["tasks"][0]["measure"] if len(tasks) == 1 else "mean over tasks"
        is_share = all(task["measure"] == "accuracy" for task in manifest["tasks"])
        shown = f"{kept['score']:.1%}" if is_share else f"{kept['score']:.4f}"
        screen.say(f"how good it is: {shown} on validation data ({measure})")
