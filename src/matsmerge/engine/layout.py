"""The files with weights: which tensor goes to which byte of which, known before the first byte."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec
from matsmerge.checkpoints.safetensors_header import encode_header
from matsmerge.checkpoints.stored import StoredCheckpoint
from matsmerge.files.open_files import OpenFiles

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Shard:
    """One safetensors file of the output."""

    file_name: str
    header: bytes
    offsets: Mapping[str, int]  # from the beginning of the file
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """All files with weights."""

    shards: tuple[Shard, ...]
    index: Mapping[str, str]  # where there are several: the file that lists them, and its JSON

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


def make_layout(
    tensors: Mapping[str, TensorSpec], stem: str, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Layout:
    """Fill shards in order; a tensor larger than a shard has one for itself."""
    groups: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in tensors.items():
        if groups[-1] and filled + spec.num_bytes > max_shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = spec
        filled += spec.num_bytes

    shards = []
    for i, group in enumerate(groups, start=1):
        part = f"-{i:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        header, offsets = encode_header(group, {"format": "pt"})
        num_bytes = len(header) + sum(spec.num_bytes for spec in group.values())
        shards.append(Shard(f"{stem}{part}.safetensors", header, offsets, num_bytes))
    if len(shards) == 1:
        return Layout(tuple(shards), {})
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for spec in tensors.values())},
        "weight_map": {name: shard.file_name for shard in shards for name in shard.offsets},
    }
    text = json.dumps(index, indent=2) + "\n"
    return Layout(tuple(shards), {f"{stem}.safetensors.index.json": text})


def bytes_at(shard: Shard, name: str, start: int, values: Tensor) -> tuple[int, memoryview]:
    """Where in its file a tensor's elements from `start` on begin, and their bytes."""
    offset = shard.offsets[name] + start * values.element_size()
    return offset, values.view(torch.uint8).numpy().data


class ShardFiles:
    """The files of a layout in a folder, written at any place by any thread or process.

    A pickled copy, perhaps on another machine, only writes to files that are there. It does not
    read them, so that a network's file system sends what was written, and no whole pages, of which
    other machines may have written the rest.
    """

    def __init__(self, folder: Path, layout: Layout, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        self.folder = folder
        self._layout, self._shards = layout, layout.shards
        self.shard_of = {name: shard for shard in layout.shards for name in shard.offsets}
        self._is_copy = flags == os.O_WRONLY
        self._open = OpenFiles(flags)

    def __reduce__(self) -> tuple[type["ShardFiles"], tuple[Path, Layout, int]]:
        return ShardFiles, (self.folder, self._layout, os.O_WRONLY)

    def create(self) -> None:
        """Make all files, with their headers and of their final size."""
        self.folder.mkdir(exist_ok=True)
        for shard in self._shards:
            file = self.descriptor(shard)
            # Not allocated in advance: writing into allocated blocks is several times slower.
            os.ftruncate(file, shard.num_bytes)
            os.pwrite(file, shard.header, 0)
            os.fsync(file)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Put a tensor's elements from `start` on where they belong."""
        shard = self.shard_of[name]
        offset, view = bytes_at(shard, name, start, values)
        while len(view):
            count = os.pwrite(self.descriptor(shard), view, offset)
            view, offset = view[count:], offset + count

    def flush(self) -> None:
        """Let what a copy has written reach the disk, which nobody else can on its machine."""
        if self._is_copy:
            self._open.sync()

    def descriptor(self, shard: Shard) -> int:
        return self._open.descriptor(self.folder / shard.file_name)

    def open(self) -> Checkpoint:
        """What has been written, to be read again."""
        return StoredCheckpoint("merged", [self.folder / x.file_name for x in self._shards], None)

    def close(self) -> None:
        self._open.close()
