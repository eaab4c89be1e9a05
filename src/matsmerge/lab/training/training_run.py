"""Train a model on tasks, into a folder."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.checkpoints.companions import copy_processor
from matsmerge.errors import DataError, ResourceError, machine_gave_out
from matsmerge.lab.training.prepared_training import PreparedTraining, prepare_training
from matsmerge.lab.training.run_folder import TRAINING_MANIFEST, RunFolder, move_state
from matsmerge.lab.training.trainer import load_weights, make_trainer, scores_of, should_stop
from matsmerge.lab.training.training_options import FULL, make_training_options
from matsmerge.models.pretrained import quiet
from matsmerge.notebook_table import notebook_table
from matsmerge.progress import AnyProgress, Progress, listener
from matsmerge.tasks.task_file import TaskFile
from matsmerge.version import versions


@dataclass(frozen=True)
class Trained:
    """A finished run: where it is, and what `training.json` there says."""

    folder: Path
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        score = "" if self.score is None else f", validation score {self.score:.4g}"
        return f"<Trained {self.folder}: {self.manifest['num_steps']} batches{score}>"

    def _repr_html_(self) -> str:
        rows = {"folder": self.folder, "batches": self.manifest["num_steps"], "score": self.score}
        return notebook_table("Trained", rows)

    @property
    def score(self) -> float | None:
        """The validation score of the checkpoint that was kept."""
        kept = self.manifest["kept"]
        found = [c["score"] for c in self.manifest["checkpoints"] if c["step"] == kept]
        return found[0] if found else None


def train(
    model: str | Path,
    tasks: str | Path | TaskFile | Sequence[str | Path | TaskFile],
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str | None = None,
    progress: AnyProgress | None = None,
    **options: Any,
) -> Trained:
    """Fine-tune a model on one task, or on several jointly; options as in `TrainingOptions`."""
    chosen = make_training_options(**options)
    several = [tasks] if isinstance(tasks, (str, Path, TaskFile)) else tasks
    folder = RunFolder(Path(out), resume=resume, overwrite=overwrite)
    check_device(device)
    folder.check()
    return run_training(prepare_training(model, several, chosen), folder, device, progress)


def check_device(device: str | None) -> None:
    """Refuse a device that this machine lacks, and training in several processes."""
    if device not in (None, "cpu", "cuda", "mps"):
        raise DataError(
            f"device '{device}': expected cpu, cuda or mps; choose one of several GPUs with "
            "CUDA_VISIBLE_DEVICES"
        )
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(str(device), True):
        raise DataError(f"device '{device}': this machine has none that torch can use")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise DataError("training runs in one process; start it without torchrun")


def run_training(
    prepared: PreparedTraining,
    folder: RunFolder,
    device: str | None = None,
    progress: AnyProgress | None = None,
) -> Trained:
    """Train, and write the folder."""
    folder.check(prepared.inputs)
    last = folder.open(prepared.identity)
    try:
        with _resources(folder), quiet():
            state = _train(prepared, folder.path, last, device, listener(progress))
            folder.output.mkdir()
            prepared.start.model.to("cpu").eval()
            prepared.start.write(folder.output)
            copy_processor(prepared.processor_folders, folder.output)
            manifest = _manifest(prepared, state)
            (folder.output / TRAINING_MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            folder.finish()
    finally:
        folder.close()
    return Trained(folder.target, manifest)


def _train(
    prepared: PreparedTraining,
    folder: Path,
    last: Path | None,
    device: str | None,
    progress: Progress,
) -> dict[str, Any]:
    """Run Trainer, and leave the best values in the model; returns Trainer's state."""
    starting = prepared.starting
    trainer = make_trainer(
        prepared.trainee, starting.options, starting.rate, folder, progress, device
    )
    if last is not None:
        done = move_state(last)
        if should_stop(done["log_history"], starting.options.patience):
            # It was interrupted between its last batch and the end.
            load_weights(prepared.start.model, Path(done["best_model_checkpoint"]))
            return done
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    return {
        "log_history": trainer.state.log_history,
        "global_step": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
    }


def _manifest(prepared: PreparedTraining, state: Mapping[str, Any]) -> dict[str, Any]:
    """What was done. No times in it: the same run gives the same bytes."""
    starting, history = prepared.starting, state["log_history"]
    scores = scores_of(history)
    kept = max(scores, key=lambda step: (scores[step], -step)) if scores else state["global_step"]
    packages = ["transformers", *(["peft"] if starting.kind is not None else [])]
    return {
        "format": 1,
        "versions": versions("torch", *packages, "python"),
        **prepared.described,
        "adapter": FULL if starting.kind is None else starting.kind.name,
        "learning_rate": starting.rate,
        "options": starting.options.described(),
        "num_steps": state["global_step"],
        "stopped_early": state["global_step"] < state["max_steps"],
        "checkpoints": [_checkpoint(history, step) for step in scores],
        "kept": kept,
        "notes": prepared.notes,
    }


def _checkpoint(history: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any]:
    """The scores at a checkpoint, and the training loss since the one before."""
    found: dict[str, Any] = {}
    for entry in history:
        if entry["step"] == step:
            found |= entry
    prefix = "score of "
    of_tasks = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
    return {
        "step": step,
        "score": found["eval_score"],
        "scores": of_tasks,
        "training_loss": found.get("loss"),
        "learning_rate": found.get("learning_rate"),
    }


@contextmanager
def _resources(folder: RunFolder) -> Iterator[None]:
    """Turn a full disk or a lack of memory into a `ResourceError`; checkpoints stay."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{folder.path}: {error.strerror or error}; make room, and continue from the last "
            "checkpoint with --resume"
        ) from error
    except RuntimeError as error:  # torch has a class of its own for this on GPUs only
        if not machine_gave_out(error):
            raise
        raise ResourceError(
            f"out of memory ({first_line(error)}); try a smaller --batch-size with a larger "
            "--accumulate"
        ) from error
