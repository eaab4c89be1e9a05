"""Which tensor goes to which byte of which file, decided before anything is computed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matsmerge.checkpoints.checkpoint import TensorSpec
from matsmerge.checkpoints.safetensors_header import encode_header

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
    index_name: str | None
    index: str | None  # the JSON that lists them, where there are several

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


def make_layout(
    tensors: Sequence[tuple[str, TensorSpec]], stem: str, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Layout:
    """Fill shards in order; a tensor larger than a shard has one for itself."""
    groups: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in tensors:
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
        return Layout(tuple(shards), None, None)
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for _, spec in tensors)},
        "weight_map": {name: shard.file_name for shard in shards for name in shard.offsets},
    }
    text = json.dumps(index, indent=2) + "\n"
    return Layout(tuple(shards), f"{stem}.safetensors.index.json", text)
