"""Checkpoints in safetensors files: one file, or the shards of one model."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.checkpoints.input_file import InputFile, look_at
from matsmerge.checkpoints.safetensors_header import (
    MAX_TENSORS,
    SafetensorsHeader,
    read_header,
    too_many_tensors,
)
from matsmerge.errors import CheckpointError, ResourceError
from matsmerge.files.mirror import each_at_once, remote_file
from matsmerge.files.open_files import OpenFiles
from matsmerge.files.remote_file import RemoteFile, fetching
from matsmerge.problems import noted

_PLACES_LOOKED_AT = 8  # to see whether what will be read soon is in memory


class StoredCheckpoint(Checkpoint):
    """Tensors in safetensors files, read with `pread`, or by ranges where a file is remote.

    A pickled copy opens them for itself.
    """

    def __init__(self, label: str, paths: Sequence[Path], folder: Path | None) -> None:
        self.label = label
        self.folder = folder
        specs: dict[str, TensorSpec] = {}
        self._where: dict[str, tuple[Path, int]] = {}
        self._remote: dict[Path, RemoteFile] = {}
        files = []
        metadata: dict[str, str] = {}
        problems: list[str] = []
        num_tensors = 0
        for path, opened in zip(paths, each_at_once(_open, paths), strict=True):
            with noted(problems, CheckpointError):
                file, header, remote = opened()
                files.append(file)
                if remote is not None:
                    self._remote[path] = remote
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
                if self._remote and (remote := self._remote.get(path)):
                    remote.read_into(view, offset)
                    return
                count = os.preadv(self._open.descriptor(path), [view], offset)
            except OSError as error:
                raise _not_read(path, error) from error
            if count == 0:
                raise CheckpointError(
                    f"{path}: ended while reading tensor '{name}'; it was cut since it was opened"
                )
            view = view[count:]
            offset += count

    def read_stretches(self, stretches: Sequence[tuple[str, int, int]]) -> Iterable[Tensor]:
        if not self._remote:
            return super().read_stretches(stretches)
        return fetching().map(self._read_alone, stretches)

    def _read_alone(self, stretch: tuple[str, int, int]) -> Tensor:
        """A stretch; if it is remote, the block that it lies in is not fetched for it."""
        name, start, stop = stretch
        remote = self._remote.get(self._where[name][0])
        if remote is None:
            return self.read(*stretch)
        try:
            content = remote.read(*self._span(name, start, stop))
        except OSError as error:
            raise _not_read(self._where[name][0], error) from error
        return torch.frombuffer(bytearray(content), dtype=self.specs[name].dtype)

    def prefetch(self, name: str, start: int, stop: int) -> None:
        path = self._where[name][0]
        begin, end = self._span(name, start, stop)
        if remote := self._remote.get(path):
            remote.prefetch(begin, end)
        elif hasattr(os, "posix_fadvise"):
            file = self._open.descriptor(path)
            places = range(begin, end, max(1, (end - begin) // _PLACES_LOOKED_AT))
            if not _are_in_memory(file, places):
                os.posix_fadvise(file, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def _span(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """The bytes of a stretch in its file."""
        offset, size = self._where[name][1], self.specs[name].dtype.itemsize
        return offset + start * size, offset + stop * size


def _open(path: Path) -> tuple[InputFile, SafetensorsHeader, RemoteFile | None]:
    file = look_at(path)  # before it is read: a later change is then noticed
    return file, read_header(path), remote_file(path)


def _not_read(path: Path, error: OSError) -> ResourceError:
    """Say of a file that was opened, and now cannot be read, how to go on."""
    return ResourceError(
        f"{path}: cannot be read any more ({error.strerror}); what was done is kept, continue "
        "with --resume"
    )


def _are_in_memory(file: int, places: Iterable[int]) -> bool:
    """Whether the kernel has the bytes at some places of a file in memory; False if it won't say.

    Asked to read what it has, it goes through every page of it, which takes time as well.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        return all(os.preadv(file, [bytearray(1)], place, os.RWF_NOWAIT) for place in places)
    except OSError:
        return False
