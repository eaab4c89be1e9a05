"""What happens to a job: read blocks, merge or measure them, round the result."""

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from matsmerge.checkpoints.alignment import AlignedModel, Alignment
from matsmerge.checkpoints.checkpoint import Buffer, dtype_name
from matsmerge.engine.plan import Job, Parameter
from matsmerge.errors import NonFiniteError
from matsmerge.methods.method import BLOCK_ELEMENTS, Measured, Pass, Site, Task
from matsmerge.methods.passthrough import Passthrough


class Sink(Protocol):
    """Takes merged values; called from many threads or processes, never twice for one element."""

    def write(self, name: str, start: int, values: Tensor) -> None: ...


@dataclass(frozen=True)
class Worker:
    """Works on jobs; it has the models' names and offsets, and opens their files itself."""

    alignment: Alignment
    allow_nonfinite: bool

    def merge(self, job: Job, measured: Callable[[Parameter], Measured], sink: Sink) -> Job:
        """Merge all pieces of a job into a sink."""
        self._prefetch(job)
        for piece in job.pieces:
            learned = measured(piece.parameter)
            for start in range(piece.start, piece.stop, BLOCK_ELEMENTS):
                stop = min(start + BLOCK_ELEMENTS, piece.stop)
                sink.write(
                    piece.parameter.name, start, self._merge(piece.parameter, start, stop, learned)
                )
        return job

    def observe(self, job: Job, reading: Pass) -> tuple[int, list[Any]]:
        """Note what a pass wants to know; with the job's index, to put notes in order."""
        if reading.spacing is None:
            self._prefetch(job)
        notes = [reading.observe(site) for site in self._sites(job, reading)]
        return job.index, reading.fold(notes) if notes else []

    def _merge(self, parameter: Parameter, start: int, stop: int, measured: Measured) -> Tensor:
        if parameter.compute_dtype is None:
            return self._source(parameter).read(parameter.name, start, stop)
        merged = parameter.rule.method.merge(self._site(parameter, start, stop), measured)
        if not self.allow_nonfinite:
            _check_result(parameter, merged)
        return merged.to(parameter.spec.dtype)

    def _source(self, parameter: Parameter) -> AlignedModel:
        """The model an integer buffer is taken from: they are equal unless one was chosen."""
        method = parameter.rule.method
        name = method.model if isinstance(method, Passthrough) else self.alignment.models[0].name
        return next(m for m in self.alignment.everyone if m.name == name)

    def _sites(self, job: Job, reading: Pass) -> Iterator[Site]:
        position = job.first_element
        for piece in job.pieces:
            if reading.spacing is None:
                starts = range(piece.start, piece.stop, reading.block_elements)
            else:
                ahead = -position % reading.spacing
                starts = range(piece.start + ahead, piece.stop, reading.spacing)
            for start in starts:
                stop = min(start + reading.block_elements, piece.stop)
                yield self._site(piece.parameter, start, stop)
            position += piece.stop - piece.start

    def _site(self, parameter: Parameter, start: int, stop: int) -> Site:
        load = partial(self._load, parameter, start, stop)
        rule = parameter.rule
        tasks = tuple(
            Task(model.name, weight, density, partial(load, model))
            for model, weight, density in zip(
                self.alignment.models, rule.weights, rule.densities, strict=True
            )
        )
        return Site(parameter.name, start, stop, tasks, partial(load, self.alignment.base))

    def _load(
        self,
        parameter: Parameter,
        start: int,
        stop: int,
        model: AlignedModel,
        out: Tensor | None = None,
    ) -> Tensor:
        buffer = _buffer(stop - start, model.spec(parameter.name).dtype)
        model.read_into(buffer, parameter.name, start)
        block = torch.empty(stop - start, dtype=parameter.compute_dtype) if out is None else out
        block.copy_(buffer.tensor)
        if not self.allow_nonfinite and not _is_finite(block):
            finite = block.isfinite()
            raise NonFiniteError(
                f"{model.checkpoint.label}: tensor '{model.names[parameter.name]}' holds "
                f"{block[~finite][0].item()} (element {start + int((~finite).nonzero()[0])}); "
                "repair the checkpoint, or merge it all the same with --allow-nonfinite"
            )
        return block

    def _prefetch(self, job: Job) -> None:
        for piece in job.pieces:
            for model in self.alignment.everyone:
                model.prefetch(piece.parameter.name, piece.start, piece.stop)


_buffers = threading.local()


def _buffer(num_elements: int, dtype: torch.dtype) -> Buffer:
    """A block as stored, in memory that its thread uses again and again."""
    if num_elements != BLOCK_ELEMENTS:
        return Buffer(num_elements, dtype)
    own: dict[str, Buffer] = _buffers.__dict__
    if str(dtype) not in own:
        own[str(dtype)] = Buffer(num_elements, dtype)
    return own[str(dtype)]


def _is_finite(block: Tensor) -> bool:
    # NaN and Inf survive a sum of squares, the cheapest test. It may also overflow: look again.
    return math.isfinite(torch.dot(block, block).item()) or bool(block.isfinite().all())


def _check_result(parameter: Parameter, merged: Tensor) -> None:
    dtype = parameter.spec.dtype
    limit = torch.finfo(dtype).max
    fits = _is_finite(merged)
    if fits and limit < torch.finfo(merged.dtype).max / 2:
        fits = bool(merged.abs().max() <= limit)
    if not fits:
        raise NonFiniteError(
            f"the merged tensor '{parameter.name}' does not fit into {dtype_name(dtype)} (largest "
            f"magnitude {merged.abs().max():.4g}, at most {limit:.4g}); choose another --dtype, "
            "smaller weights, or --allow-nonfinite"
        )
