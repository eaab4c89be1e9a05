"""Sketches in eight bits a number, as files hold them.

A sketch [B | diagonal] (d, r + 1) is stored as the diagonal of G in float32 and

    B_ij ~ sqrt(diagonal_i) scales_j codes_ij      codes from -127 to 127

The diagonal makes rows alike: without it, an input that is far larger than all others (a constant,
or one of the few that stand out in language models) would leave no digits to them. What rounding
does to a merge is then as little as bfloat16 does, at half the size.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.statistics.kinds.statistic import Form

CODES = torch.int8
_LARGEST = 127
_SCALES, _DIAGONAL = ":scales", ":diagonal"  # after the name of the array with the codes


def encode_sketch(name: str, kept: Tensor) -> dict[str, Tensor]:  # (d, r + 1)
    """The arrays that a file has for a sketch; of one that is not finite, scales are not either."""
    diagonal = kept[:, -1].float()
    rows = _row_scales(diagonal).double()
    alike = kept[:, :-1].double() / rows.where(rows > 0, 1)[:, None]
    scales = (alike.abs().amax(0) / _LARGEST).float()
    codes = alike / scales.where(scales > 0, 1).double()
    rounded = codes.nan_to_num(0).round().clamp(-_LARGEST, _LARGEST).to(CODES)
    return {name: rounded} | dict(zip(_beside(name), (scales, diagonal), strict=True))


def coded_specs(name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
    """What a file has for a sketch (d, r + 1)."""
    d, num = spec.shape[0], spec.shape[1] - 1
    scales, diagonal = _beside(name)
    return {
        name: TensorSpec(CODES, (d, num)),
        scales: TensorSpec(torch.float32, (num,)),
        diagonal: TensorSpec(torch.float32, (d,)),
    }


class CodedSketches(Checkpoint):
    """The arrays of a file with its sketches as what they mean, in float32."""

    def __init__(self, stored: Checkpoint, coded: Mapping[str, TensorSpec]) -> None:
        self._stored, self._coded = stored, coded
        self.label, self.aliases = stored.label, stored.aliases
        self.folder, self.place, self.files = stored.folder, stored.place, stored.files
        beside = {name for sketch in coded for name in _beside(sketch)}
        self.specs = {
            name: coded.get(name, spec) for name, spec in stored.specs.items() if name not in beside
        }

    @property
    def origin(self) -> Checkpoint:
        return self._stored

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        if name not in self._coded:
            self._stored.read_into(buffer, name, start)
            return
        stop, length = start + len(buffer.tensor), self._coded[name].shape[1]
        first, last = start // length, -(-stop // length)
        num = length - 1
        scales, diagonal = _beside(name)
        rows = self._stored.read(diagonal, first, last)[:, None]
        codes = self._stored.read(name, first * num, last * num).view(-1, num)
        b = codes.float() * self._stored.read(scales, 0, num) * _row_scales(rows)
        flat = torch.cat([b, rows], 1).view(-1)
        buffer.tensor.copy_(flat[start - first * length :][: stop - start])

    def prefetch(self, name: str, start: int, stop: int) -> None:
        if name not in self._coded:
            self._stored.prefetch(name, start, stop)


def decode_sketches(stored: Checkpoint, forms: Mapping[str, Form]) -> Checkpoint:
    """The arrays of a file with all sketches whose codes, scales and diagonals fit together."""
    coded = {}
    for name, form in forms.items():
        codes = stored.specs.get(name)
        if form == "sketch" and codes is not None and len(codes.shape) == 2:
            sketch = TensorSpec(torch.float32, (codes.shape[0], codes.shape[1] + 1))
            if coded_specs(name, sketch).items() <= stored.specs.items():
                coded[name] = sketch
    return CodedSketches(stored, coded) if coded else stored


def bytes_in_file(arrays: Checkpoint, name: str) -> int:
    """What an array takes in its file, with what belongs to its codes."""
    specs = arrays.origin.specs
    return sum(specs[part].num_bytes for part in (name, *_beside(name)) if part in specs)


def _beside(name: str) -> tuple[str, str]:
    return f"{name}{_SCALES}", f"{name}{_DIAGONAL}"


def _row_scales(diagonal: Tensor) -> Tensor:
    return diagonal.clamp(min=0).sqrt()  # not below zero but in damaged files
