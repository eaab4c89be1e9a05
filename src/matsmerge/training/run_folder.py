"""Where a run keeps its checkpoints, until the output appears all at once.

Everything is written into a hidden folder beside the output: `run.json` says what run it is,
`checkpoint-N` is the state after batch N. The output is made in `output/` and then renamed.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from matsmerge.errors import AnotherRunError, OutputError
from matsmerge.guarded_files import Content, Count, parse_as, read_json
from matsmerge.whole_folder import hold, is_vacant, name_problems, put_in_place, put_text, sync

MANIFEST = "training.json"
_RUN = "run.json"
_STATE = "trainer_state.json"  # what Trainer writes last of a checkpoint


class RunFolder:
    """The hidden folder of one run."""

    def __init__(self, target: Path) -> None:
        self.target = target
        # Absolute, since a checkpoint's own path is among what it stores.
        self.path = staging_path(target).absolute()
        self.output = self.path / "output"
        self._lock: int | None = None
        self._is_ours = False

    def open(self, identity: Mapping[str, Any], *, resume: bool) -> Path | None:
        """Begin, or return the checkpoint at which to continue a run of the same identity."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = hold(self.path)
            self._is_ours = True
            last = self._last(identity) if resume else None
            for left_over in self.path.iterdir():
                # Without what it is a run of, no checkpoint could be continued after a kill here.
                is_kept = left_over.name == _RUN or read_state(left_over) is not None
                if last is None or not is_kept:
                    _remove(left_over)
            put_text(self.path / _RUN, json.dumps(identity, indent=2) + "\n")
            return last
        except BlockingIOError as error:
            self.close()
            raise OutputError(f"{self.target}: another run is writing it just now") from error
        except OSError as error:
            self.close()
            raise OutputError(f"{self.path}: cannot be written ({error.strerror})") from error
        except OutputError:
            self.close()
            raise

    def _last(self, identity: Mapping[str, Any]) -> Path | None:
        checkpoint = self.last_checkpoint()
        if checkpoint is None:
            return None  # it was stopped before its first
        try:
            found = read_json(self.path / _RUN, OutputError)
        except OutputError:
            found = {}
        found = found if isinstance(found, dict) else {}
        plain = json.loads(json.dumps(identity))
        differing = [k for k in {**plain, **found} if plain.get(k) != found.get(k)]
        if differing:
            raise AnotherRunError(
                [
                    f"{self.target}: the interrupted run was another: {key} was "
                    f"{_short(found.get(key))} and is {_short(plain.get(key))}; give what it had, "
                    "or start anew with --overwrite"
                    for key in differing
                ]
            )
        return checkpoint

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that is complete."""
        found = {}
        for folder in self.path.glob("checkpoint-*"):
            number = folder.name.removeprefix("checkpoint-")
            if number.isdecimal() and read_state(folder) is not None:
                found[int(number)] = folder
        return found[max(found)] if found else None

    def finish(self) -> None:
        """Let the output appear under its name, and leave nothing else."""
        mode = (self.output / MANIFEST).stat().st_mode  # safetensors' files are the owner's only
        for path in (*self.output.rglob("*"), self.output):
            if path.is_file():
                path.chmod(mode)
            sync(path)
        replaced = self.path / "replaced"
        put_in_place(self.output, self.target, replaced)
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Leave checkpoints for another run to continue; nothing, if there is none."""
        if self._is_ours and self.last_checkpoint() is None:
            shutil.rmtree(self.path, ignore_errors=True)
        self._is_ours = False
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def staging_path(target: Path) -> Path:
    """Where an output is written until it is complete."""
    return target.with_name(f".{target.name}.partial")


class _State(Content):
    """The parts of a trainer_state.json that Trainer needs to continue."""

    model_config = ConfigDict(extra="allow")

    global_step: Count = 0
    max_steps: int = 0
    epoch: float | None = None
    num_train_epochs: float | None = None
    best_metric: float | None = Field(default=None, allow_inf_nan=True)
    best_model_checkpoint: str | None = None
    log_history: list[dict[str, Any]] = Field(default_factory=list)
    stateful_callbacks: dict[str, Any] = Field(default_factory=dict)


def read_state(checkpoint: Path) -> dict[str, Any] | None:
    """What Trainer wrote of a checkpoint; None if it did not come that far, or if it is damaged."""
    path = checkpoint / _STATE
    try:
        state = read_json(path, OutputError)
        parse_as(state, _State, str(path), OutputError)
    except OutputError:
        return None
    assert isinstance(state, dict)
    return state


def move_state(checkpoint: Path) -> None:
    """Let a checkpoint know where the best one is, should the folder have another name now."""
    state = read_state(checkpoint)
    if state is None or not state.get("best_model_checkpoint"):
        return
    best = str(checkpoint.parent / Path(state["best_model_checkpoint"]).name)
    if best != state["best_model_checkpoint"]:
        state["best_model_checkpoint"] = best
        (checkpoint / _STATE).write_text(json.dumps(state, indent=2) + "\n")


def check_target(
    target: Path, inputs: Mapping[str, Path], *, overwrite: bool, resume: bool
) -> list[str]:
    """Why an output must not or cannot be written; nothing if it can."""
    try:
        return _problems(target, inputs, overwrite, resume)
    except (OSError, RuntimeError) as error:  # links in a circle are a RuntimeError
        reason = getattr(error, "strerror", None) or error
        return [f"{target}: cannot be written to ({reason}); choose another --out"]


def _problems(target: Path, inputs: Mapping[str, Path], overwrite: bool, resume: bool) -> list[str]:
    if problems := name_problems(target):
        return problems
    if not target.name or target.is_symlink():
        return [f"{target}: is not the name of a folder to make; choose another --out"]
    place = target.resolve()
    for label, used in inputs.items():
        if place.is_relative_to(used.resolve()) or used.resolve().is_relative_to(place):
            return [f"{target}: overlaps with the input {label}; choose another --out"]
    if not is_vacant(target):
        if not (target / MANIFEST).is_file():
            problems.append(f"{target}: exists and was not trained by us; choose another --out")
        elif not overwrite:
            problems.append(f"{target}: exists already; replace it with --overwrite")
    if staging_path(target).exists() and not (overwrite or resume):
        problems.append(
            f"{target}: an earlier run was interrupted; continue it with --resume, or start anew "
            "with --overwrite"
        )
    parent = next(p for p in place.parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        problems.append(f"{parent}: cannot be written to; choose another --out")
    return problems


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
