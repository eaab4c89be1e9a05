"""Checkpoints in FP8 with scales or in MXFP4, read as the numbers they stand for.

    X            float8, with X_scale_inv or X_scale beside it: each value times the scale of its
                 tensor, row, group or block (DeepSeek, transformers, compressed-tensors)
    X_blocks     (experts, out, groups, 16) bytes of two 4-bit floats each, and X_scales (experts,
                 out, groups), exponents of 2 plus 127: X is (experts, in, out) (gpt-oss)

They are presented as bfloat16. Products of FP8 are read in float32, before they are rounded to
that; products of MXFP4 are exact in it. Scales of activations mean nothing any more.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matsmerge.checkpoints.checkpoint import QUANTIZED_DTYPES, Buffer, Checkpoint, TensorSpec
from matsmerge.checkpoints.recent_value import RecentValue
from matsmerge.checkpoints.scaled_floats import Scaled
from matsmerge.errors import CheckpointError
from matsmerge.files.guarded_files import read_json

_SCALES = ("_scale_inv", "_scale")
_ACTIVATIONS = re.compile(r".*[._](input|output|activation|[qkv])_scale")
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.bfloat16)
_FP4 = torch.cat([_FP4, -_FP4])
_DEFAULT_BLOCK = (128, 128)  # of X_scale_inv, where config.json does not say
_PACKED_BYTES = 16  # of a group of 32 numbers in MXFP4


class DecodedCheckpoint(Checkpoint):
    """A checkpoint whose quantized tensors are read as bfloat16."""

    def __init__(
        self, stored: Checkpoint, scaled: Mapping[str, Scaled], packed: Mapping[str, str]
    ) -> None:
        self.stored, self.scaled, self.packed = stored, scaled, packed
        self.label, self.aliases = stored.label, stored.aliases
        self.folder, self.place, self.files = stored.folder, stored.place, stored.files
        used = {f"{name}{how.ending}" for name, how in scaled.items()}
        used |= {f"{name.removesuffix('_blocks')}_scales" for name in packed}
        self.specs = {
            packed.get(name, name): self._spec(name, spec)
            for name, spec in stored.specs.items()
            if name not in used and not (scaled and _ACTIVATIONS.fullmatch(name))
        }
        self._blocks = {name: blocks for blocks, name in packed.items()}
        self._expert: RecentValue[Tensor] = RecentValue()
        kinds = ["FP8"] * bool(scaled) + ["MXFP4"] * bool(packed)
        num = len(scaled) + len(packed)
        self.note = f"{num} tensors in {' and '.join(kinds)} are read as bfloat16"

    def _spec(self, name: str, spec: TensorSpec) -> TensorSpec:
        if name in self.packed:
            experts, num_out, groups, _ = spec.shape
            return TensorSpec(torch.bfloat16, (experts, groups * 2 * _PACKED_BYTES, num_out))
        return TensorSpec(torch.bfloat16, spec.shape) if name in self.scaled else spec

    @property
    def origin(self) -> Checkpoint:
        return self.stored.origin

    def scaled_as(self, name: str) -> Scaled | None:
        return self.scaled.get(name)

    def read_dtype(self, name: str) -> torch.dtype:
        if name in self.scaled:
            return torch.float32
        return self.specs[name].dtype if name in self._blocks else self.stored.read_dtype(name)

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        stop = start + len(buffer.tensor)
        if name in self.scaled:
            buffer.tensor.copy_(self._read_scaled(name, start, stop))
        elif name in self._blocks:
            size = prod(self.specs[name].shape[1:])
            for expert in range(start // size, ceil(stop / size)):
                values = self._expert.get(f"{expert} {name}", self._read_expert)
                first, last = max(start, expert * size), min(stop, (expert + 1) * size)
                part = values[first - expert * size : last - expert * size]
                buffer.tensor[first - start : last - start].copy_(part)
        else:
            self.stored.read_into(buffer, name, start)

    def prefetch(self, name: str, start: int, stop: int) -> None:
        if name not in self._blocks:
            self.stored.prefetch(name, start, stop)

    def _read_scaled(self, name: str, start: int, stop: int) -> Tensor:
        values = self.stored.read(name, start, stop).float()
        how = self.scaled[name]
        if how.ending is None:
            return values
        scale = f"{name}{how.ending}"
        if how.single is not None:
            return values.mul_(self.stored.read(scale, 0, 1).float())
        *_, num_rows, length = (1, *self.specs[name].shape)
        num_columns = ceil(length / how.columns)
        first, last = start // length, ceil(stop / length)
        rows = torch.arange(first, last)
        per_matrix = ceil(num_rows / how.rows)
        lines = rows // num_rows * per_matrix + rows % num_rows // how.rows
        low, high = int(lines[0]), int(lines[-1]) + 1
        scales = self.stored.read(scale, low * num_columns, high * num_columns).float()
        wide = scales.view(-1, num_columns)[lines - low].repeat_interleave(how.columns, 1)
        return values.mul_(wide[:, :length].reshape(-1)[start - first * length :][: stop - start])

    def _read_expert(self, key: str) -> Tensor:
        """One expert's weight, flat."""
        number, name = key.split(" ", 1)
        blocks = self._blocks[name]
        _, num_out, groups, width = self.stored.specs[blocks].shape
        num, expert = num_out * groups, int(number)
        packed = self.stored.read(blocks, expert * num * width, (expert + 1) * num * width)
        scales = f"{blocks.removesuffix('_blocks')}_scales"
        exponents = self.stored.read(scales, expert * num, (expert + 1) * num).int() - 127
        pairs = torch.stack([packed & 15, packed >> 4], dim=-1).int()
        values = torch.ldexp(_FP4[pairs].view(num, 2 * width), exponents[:, None])
        return values.view(num_out, -1).T.contiguous().view(-1).to(torch.bfloat16)


def decode_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with quantized tensors as bfloat16; itself if it has none."""
    specs = checkpoint.specs
    quantized = [n for n, spec in specs.items() if spec.dtype in QUANTIZED_DTYPES.values()]
    packed = {
        name: name.removesuffix("_blocks")
        for name, spec in specs.items()
        if name.endswith("_blocks") and _is_packed(specs, name)
    }
    if not quantized and not packed:
        return checkpoint
    config = quantization_config(checkpoint.folder)
    block = _block_size(config)
    scaled: dict[str, Scaled] = {}
    problems: list[str] = []
    scales = [n for n in specs if n.endswith(_SCALES) and not _ACTIVATIONS.fullmatch(n)]
    for name in (n for n in quantized if not n.endswith(_SCALES)):
        ending = next((end for end in _SCALES if name + end in specs), None)
        scale = None if ending is None else name + ending
        how = _find_scaling(specs, name, ending, block)
        what = f"{checkpoint.label}: tensor '{name}' is {specs[name]}"
        if scale is None and scales:
            problems.append(f"{what} and has no scales, which others have, such as '{scales[0]}'")
        elif how is None:
            problems.append(
                f"{what}, and its scales '{scale}' are {list(specs[scale or name].shape)}: neither "
                "one, nor one for each row, group or block "
                f"({list(block) if block else 'of an unknown size'}, by its config.json)"
            )
        else:
            has_powers = (
                how.scale_dtype == torch.float8_e8m0fnu or config.get("scale_fmt") == "ue8m0"
            )
            scaled[name] = replace(how, has_powers=has_powers)
    CheckpointError.raise_all(problems)
    return DecodedCheckpoint(checkpoint, scaled, packed)


def _is_packed(specs: Mapping[str, TensorSpec], name: str) -> bool:
    blocks, scales = specs[name], specs.get(f"{name.removesuffix('_blocks')}_scales")
    is_bytes = scales is not None and blocks.dtype == scales.dtype == torch.uint8
    is_grouped = len(blocks.shape) == 4 and blocks.shape[-1] == _PACKED_BYTES
    return is_bytes and is_grouped and scales is not None and scales.shape == blocks.shape[:-1]


def _find_scaling(
    specs: Mapping[str, TensorSpec], name: str, ending: str | None, block: tuple[int, int] | None
) -> Scaled | None:
    """How a tensor is scaled, by the shape of its scales; None if they do not fit."""
    dtype, shape = specs[name].dtype, specs[name].shape
    if ending is None:
        return Scaled(dtype)
    scales = specs[name + ending]
    grid, how = scales.shape, Scaled(dtype, ending, scale_dtype=scales.dtype)
    if scales.num_elements == 1:
        return replace(how, single=grid)
    if len(grid) == len(shape) - 1:  # one for each row, without saying so
        grid, how = (*grid, 1), replace(how, is_flat=True)
    if len(grid) != len(shape) or len(shape) < 2 or grid[:-2] != shape[:-2]:
        return None
    if block is None and ending == "_scale_inv":
        block = _DEFAULT_BLOCK
    (num_rows, length), (lines, columns) = shape[-2:], grid[-2:]
    if block and (lines, columns) == (ceil(num_rows / block[0]), ceil(length / block[1])):
        return replace(how, rows=block[0], columns=block[1])
    if lines not in (1, num_rows) or not columns or length % columns:
        return None
    return replace(how, rows=num_rows // lines, columns=length // columns)


def quantization_config(folder: Path | None) -> dict[str, Any]:
    """What the configuration in a folder says of quantization; empty if it says nothing."""
    path = folder / "config.json" if folder else None
    found: Any = read_json(path, CheckpointError) if path and path.exists() else {}
    config = found.get("quantization_config") if isinstance(found, dict) else None
    return config if isinstance(config, dict) else {}


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The size of blocks that a configuration names."""
    groups = config.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in groups if isinstance(group, dict)]
    sizes = [w.get("block_structure") for w in weights if isinstance(w, dict)]
    for size in (config.get("weight_block_size"), *sizes):
        if isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) for n in size):
            return (size[0], size[1]) if min(size) > 0 else None
    return None
