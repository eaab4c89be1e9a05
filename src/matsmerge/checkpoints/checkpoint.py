"""The interface of checkpoints: headers at once, values of one piece of one tensor at a time."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from matsmerge.checkpoints.input_file import InputFile
from matsmerge.errors import CheckpointError
from matsmerge.problems import counted

if TYPE_CHECKING:
    from matsmerge.checkpoints.scaled_floats import Scaled

_MOST_OF_LINE = 200  # characters


@dataclass(frozen=True)
class TensorSpec:
    """What a header says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


class Buffer:
    """Memory to read into: a flat tensor, and the same memory as bytes.

    What goes on to a CUDA `device` is read to pinned memory, from which it is copied while the
    next values are read. Torch does not give such memory to others before it has been copied.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self._device, self._is_pinned = device, device.startswith("cuda")
        self.tensor = torch.empty(num_elements, dtype=dtype, pin_memory=self._is_pinned)
        self.bytes: memoryview = self.tensor.view(torch.uint8).numpy().data

    def first(self, num_elements: int) -> "Buffer":
        """The memory of its first elements."""
        if num_elements == len(self.tensor):
            return self
        part = copy(self)
        part.tensor = self.tensor[:num_elements]
        part.bytes = self.bytes[: num_elements * self.tensor.element_size()]
        return part

    def on_device(self) -> Tensor:
        """The tensor where it is to go."""
        if self._device == "cpu":
            return self.tensor
        return self.tensor.to(self._device, non_blocking=self._is_pinned)


class Checkpoint(ABC):
    """Named tensors that can be read in pieces, from any thread.

    `label` is how the user named it. `specs` lists every tensor once; a tied weight's other
    names are in `aliases` (other name -> name in `specs`). `folder` is where its
    configuration and tokenizer lie, and `place` the file or folder it is read from, if any.
    `files` are all that its values come from, as they were when they were opened.
    """

    label: str
    specs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    folder: Path | None = None
    place: Path | None = None
    files: Sequence[InputFile] = ()
    note: str | None = None  # what a user should know of how it is read

    def __repr__(self) -> str:
        return f"<Checkpoint {self.label}: {counted(list(self.specs), 'tensor')}>"

    @property
    def origin(self) -> "Checkpoint":
        """The checkpoint that identifies this one: itself, or what it is computed from."""
        return self

    def read_dtype(self, name: str) -> torch.dtype:
        """The dtype to read a tensor in; one that is computed may have more digits than stored."""
        return self.specs[name].dtype

    def scaled_as(self, name: str) -> "Scaled | None":  # noqa: ARG002
        """How a tensor is stored in FP8, where it is."""
        return None

    @abstractmethod
    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        """Fill a buffer of the tensor's `read_dtype` with the elements from `start` on."""

    def read(self, name: str, start: int, stop: int, device: str = "cpu") -> Tensor:
        """Elements `start` to `stop`, flat and as stored."""
        buffer = Buffer(stop - start, self.specs[name].dtype, device)
        self.read_into(buffer, name, start)
        return buffer.on_device()

    def read_stretches(self, stretches: Sequence[tuple[str, int, int]]) -> Iterable[Tensor]:
        """Several short stretches (name, start, stop)."""
        return (self.read(*stretch) for stretch in stretches)

    def prefetch(self, name: str, start: int, stop: int) -> None:  # noqa: B027
        """Say that these elements will be read soon."""

    def spec(self, name: str) -> TensorSpec:
        """What is known of a tensor, under any of its names."""
        return self.specs[self.aliases.get(name, name)]

    def __getitem__(self, name: str) -> Tensor:
        return self.read_whole(name)

    def read_whole(self, name: str, device: str = "cpu") -> Tensor:
        """A tensor under any of its names, in its shape and as stored."""
        spec = self.spec(name)
        flat = self.read(self.aliases.get(name, name), 0, spec.num_elements, device)
        return flat.view(spec.shape)


CONVERT = "cannot be merged; convert the checkpoint to float32, bfloat16 or float16 first"
# All that can be merged or compared, by the codes of safetensors.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# What is read as something else: float8 with its scales.
QUANTIZED_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
FLOAT_DTYPES = tuple(dtype for dtype in DTYPES.values() if dtype.is_floating_point)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def first_line(error: BaseException) -> str:
    """The beginning of a foreign error's message."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= _MOST_OF_LINE else f"{line[:_MOST_OF_LINE]}…"


def check_dtype(dtype: torch.dtype, name: str, label: str) -> None:
    """Refuse a tensor whose values are not plain numbers we can merge or compare."""
    if dtype not in (*DTYPES.values(), *QUANTIZED_DTYPES.values()):
        found = f"{label}: tensor '{name}' has dtype {dtype_name(dtype)}"
        raise CheckpointError(f"{found}, which {CONVERT}")
