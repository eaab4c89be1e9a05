"""Where a run keeps its checkpoints, until the output appears all at once.

Everything is written into a hidden folder beside the output: `run.json` says what run it is,
`checkpoint-N` is the state after batch N. The output is made in `output/` and then renamed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from matsmerge.errors import AnotherRunError, OutputError
from matsmerge.files.guarded_files import Content, Count, parse_as, read_json
from matsmerge.files.output_place import check_folder
from matsmerge.files.whole_outputs import StagedFolder, put_text, writing

TRAINING_MANIFEST = "training.json"
_RUN = "run.json"
_STATE = "trainer_state.json"  # what Trainer writes last of a checkpoint


@dataclass
class RunFolder:
    """The hidden folder of one run; it may `resume` an earlier one, or `overwrite` its output."""

    target: Path
    resume: bool = False
    overwrite: bool = False

    @cached_property
    def _staged(self) -> StagedFolder:
        return StagedFolder(self.target, "training")  # what `check` refuses may have no name

    @property
    def path(self) -> Path:
        return self._staged.path

    @property
    def output(self) -> Path:
        return self._staged.output

    def check(self, inputs: Mapping[str, Path] | None = None) -> None:
        """Refuse an output that must not or cannot be written."""
        check_folder(
            self.target,
            "training",
            lambda folder: (folder / TRAINING_MANIFEST).is_file(),
            inputs=inputs,
            overwrite=self.overwrite,
            resume=self.resume,
        )

    def open(self, identity: Mapping[str, Any]) -> Path | None:
        """Begin, or return the checkpoint at which to continue a run of the same identity."""
        try:
            self._staged.open()
            with writing(self.path):
                last = self._last(identity) if self.resume else None
                kept = [path for path in self.path.iterdir() if read_state(path) is not None]
                # Without what it is a run of, no checkpoint could be continued after a kill here.
                names = frozenset([_RUN, *(path.name for path in kept)])
                self._staged.clear(keep=names if last is not None else frozenset())
                put_text(self.path / _RUN, json.dumps(identity, indent=2) + "\n")
            return last
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
        AnotherRunError.raise_all(
            f"{self.target}: the interrupted run was another: {key} was "
            f"{_short(found.get(key))} and is {_short(plain.get(key))}; give what it had, or start "
            "anew with --overwrite"
            for key in {**plain, **found}
            if plain.get(key) != found.get(key)
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
        # Files that safetensors writes can be read by their owner alone.
        mode = (self.output / TRAINING_MANIFEST).stat().st_mode
        for path in self.output.rglob("*"):
            if path.is_file():
                path.chmod(mode)
        self._staged.put_in_place()
        self._staged.discard()

    def close(self) -> None:
        """Leave checkpoints for another run to continue; nothing, if there is none."""
        if self._staged.is_open:
            has_checkpoint = self.last_checkpoint() is not None
            self._staged.close() if has_checkpoint else self._staged.discard()


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
    """Trainer's state of a checkpoint; None if it is missing (written last) or damaged."""
    path = checkpoint / _STATE
    try:
        state = read_json(path, OutputError)
        parse_as(state, _State, str(path), OutputError)
    except OutputError:
        return None
    assert isinstance(state, dict)
    return state


def move_state(checkpoint: Path) -> dict[str, Any]:
    """A complete checkpoint's state, which says where the best one is now.

    The folder may have had another name when it was written.
    """
    state = read_state(checkpoint)
    assert state is not None
    before = state.get("best_model_checkpoint")
    best = before and str(checkpoint.parent / Path(before).name)
    if best != before:
        state["best_model_checkpoint"] = best
        (checkpoint / _STATE).write_text(json.dumps(state, indent=2) + "\n")
    return state


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
