"""Checkpoints in safetensors files: one file, or the shards of one model."""

import os
from collections.abc import Sequence
from pathlib import Path

from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.checkpoints.input_file import look_at
from matsmerge.checkpoints.safetensors_header import MAX_TENSORS, read_header, too_many_tensors
from matsmerge.errors import CheckpointError, ResourceError
from matsmerge.files.open_files import OpenFiles
from matsmerge.problems import noted


class StoredCheckpoint(Checkpoint):
    """Tensors in safetensors files, read with `pread`; a pickled copy opens them for itself."""

    def __init__(self, label: str, paths: Sequence[Path], folder: Path | None) -> None:
        self.label = label
        self.folder = folder
        specs: dict[str, TensorSpec] = {}
        self._where: dict[str, tuple[Path, int]] = {}
        files = []
        metadata: dict[str, str] = {}
        problems: list[str] = []
        num_tensors = 0
        for path in paths:
            with noted(problems, CheckpointError):
                files.append(look_at(path))  # before it is read: a later change is then noticed
                header = read_header(path)
                num_tensors += len(header.specs)
                if num_tensors > MAX_TENSORS:
                    problems.append(too_many_tensors(path))
                    break
                problems += [
                    f"{path}: tensor '{name}' is also in {self._where[name][0].name}; "
                    "each tensor must be in one shard only"
                    for name in header.specs
                    if name in specs
                ]
                specs |= header.specs
                self._where |= {name: (path, offset) for name, offset in header.offsets.items()}
                metadata |= header.metadata
        CheckpointError.raise_all(problems)
        self.files = files
        self.specs = specs
        # Ties that `safetensors.torch.save_model` noted: {name that was left out: name kept}.
        self.aliases = {n: kept for n, kept in metadata.items() if kept in specs and n not in specs}
        self._open = OpenFiles(os.O_RDONLY)

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        path, offset = self._where[name]
        offset += start * self.specs[name].dtype.itemsize
        view = buffer.bytes
        while len(view):
            try:
                count = os.preadv(self._open.descriptor(path), [view], offset)
            except OSError as error:
                raise ResourceError(
                    f"{path}: cannot be read any more ({error.strerror}); what was done is kept, "
                    "continue with --resume"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{path}: ended while reading tensor '{name}'; it was cut since it was opened"
                )
            view = view[count:]
            offset += count

    def prefetch(self, name: str, start: int, stop: int) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        size = self.specs[name].dtype.itemsize
        path, offset = self._where[name]
        os.posix_fadvise(
            self._open.descriptor(path),
            offset + start * size,
            (stop - start) * size,
            os.POSIX_FADV_WILLNEED,
        )
