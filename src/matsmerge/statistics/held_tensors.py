"""Tensors that are needed again later: in memory while there is room, beyond it in a file.

What a merge along the merged model has to keep grows with the data. The file is temporary, has no
name, and is gone when the last tensor in it is.
"""

import tempfile
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Room:
    """The memory that kept tensors may take together; without a limit there is always room."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0  # taken now

    def take(self, num_bytes: int) -> bool:
        """Take some of it, if there is so much."""
        if self._max_bytes is not None and self.num_bytes + num_bytes > self._max_bytes:
            return False
        self.num_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class Kept(ABC):
    """A tensor that is kept."""

    nbytes: int

    @abstractmethod
    def load(self) -> Tensor:
        """Its values, in the machine's own memory; to be copied before they are changed."""


class Shelf:
    """Keeps tensors that are needed for about equally long; each as it was when it came."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._scratch: _Scratch | None = None

    def keep(self, values: Tensor) -> Kept:
        values = values.detach()
        if self._room.take(values.nbytes):
            own = values.to("cpu", copy=True, memory_format=torch.contiguous_format)
            return _InMemory(own, self._room)
        if self._scratch is None:
            self._scratch = _Scratch()
        return _InFile(values.cpu(), self._scratch)


class _InMemory(Kept):
    def __init__(self, values: Tensor, room: Room) -> None:
        self.nbytes, self._values, self._room = values.nbytes, values, room

    def load(self) -> Tensor:
        return self._values

    def __del__(self) -> None:
        self._room.give_back(self.nbytes)


class _Scratch:
    """A file without a name, which is closed when nobody needs it any more."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115

    def __del__(self) -> None:
        self.file.close()


class _InFile(Kept):
    def __init__(self, values: Tensor, scratch: _Scratch) -> None:
        self.nbytes, self._shape, self._dtype = values.nbytes, values.shape, values.dtype
        self._scratch, self._offset = scratch, scratch.file.seek(0, 2)
        scratch.file.write(_bytes_of(values.contiguous()))

    def load(self) -> Tensor:
        values = torch.empty(self._shape, dtype=self._dtype)
        self._scratch.file.seek(self._offset)
        num_bytes = self._scratch.file.readinto(_bytes_of(values))
        if num_bytes != self.nbytes:
            raise OSError("a temporary file is shorter than what was written to it")
        return values


def _bytes_of(values: Tensor) -> Any:
    """The memory of a contiguous tensor."""
    return values.reshape(-1).view(torch.uint8).numpy().data
