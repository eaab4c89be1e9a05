"""Tensors gathered from several checkpoints; what none of them has is a constant."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.checkpoints.scaled_floats import Scaled


@dataclass(frozen=True)
class Stored:
    """Where a tensor comes from."""

    checkpoint: Checkpoint
    name: str


class FilledCheckpoint(Checkpoint):
    """What `sources` names, and `fill` everywhere else; `of` is the checkpoint it stands for.

    Without a `fill`, only the shape is known of what is not in `sources`.
    """

    def __init__(
        self,
        label: str,
        specs: Mapping[str, TensorSpec],
        sources: Mapping[str, Stored],
        fill: float | None = None,
        of: Checkpoint | None = None,
    ) -> None:
        self.label, self.specs, self.aliases = label, specs, {}
        self.folder = of.folder if of else None
        self.place = of.place if of else None
        origins = dict.fromkeys(source.checkpoint for source in sources.values())
        self.files = [file for origin in origins for file in origin.files]
        self._sources = sources
        self._fill = fill
        self._of = of

    @property
    def origin(self) -> Checkpoint:
        return self._of or self

    def scaled_as(self, name: str) -> Scaled | None:
        source = self._sources.get(name)
        return source.checkpoint.scaled_as(source.name) if source else None

    def read_dtype(self, name: str) -> torch.dtype:
        source, stored = self._sources.get(name), self.specs[name].dtype
        if source is None or source.checkpoint.specs[source.name].dtype != stored:
            return stored
        return source.checkpoint.read_dtype(source.name)

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        source = self._sources.get(name)
        if source is None:
            assert self._fill is not None, f"only the shape of '{name}' is known"
            buffer.tensor.fill_(self._fill)
        elif source.checkpoint.read_dtype(source.name) == buffer.tensor.dtype:
            source.checkpoint.read_into(buffer, source.name, start)
        else:
            stop = start + len(buffer.tensor)
            buffer.tensor.copy_(source.checkpoint.read(source.name, start, stop))

    def prefetch(self, name: str, start: int, stop: int) -> None:
        source = self._sources.get(name)
        if source is not None:
            source.checkpoint.prefetch(source.name, start, stop)
