"""A model as the user names it: a folder with a model, or with a PEFT adapter and its base."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matsmerge.adapters.adapter import Adapter
from matsmerge.adapters.adapter_folder import open_base, read_adapter
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.companions import companion_files
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.errors import DataError
from matsmerge.models.pretrained import read_config


@dataclass(frozen=True)
class ModelFolder:
    """A model that is opened and not loaded."""

    source: str  # as the user named it
    checkpoint: Checkpoint
    adapter: Adapter | None  # if it is one
    base: Checkpoint  # of the adapter; else the checkpoint itself

    @property
    def label(self) -> str:
        return self.checkpoint.label

    @property
    def folders(self) -> list[Path]:
        """Where a tokenizer or image processor may be, the model's own first."""
        found = [self.checkpoint.folder, self.base.folder]
        return list(dict.fromkeys(folder for folder in found if folder is not None))

    def read_config(self) -> Any:
        """The configuration of the model that runs; each time another object, to be changed."""
        return read_config(self.folders[-1])


def open_model(source: str | Path) -> ModelFolder:
    """Open a model's folder or hub id, or a PEFT adapter's; links out of it are refused."""
    checkpoint = open_checkpoint(source)
    if checkpoint.folder is None:
        raise DataError(f"{source}: expected a model's folder with its config.json, found a file")
    companion_files(checkpoint.folder)
    adapter = read_adapter(checkpoint)
    base = checkpoint if adapter is None else open_base(adapter)
    companion_files(base.folder)
    return ModelFolder(str(source), checkpoint, adapter, base)
