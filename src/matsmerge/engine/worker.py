"""What happens to a job: read blocks, merge or measure them, round the result."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from matsmerge.checkpoints.alignment import AlignedModel, Alignment
from matsmerge.checkpoints.checkpoint import dtype_name
from matsmerge.engine.plan import Job, Parameter, Piece
from matsmerge.errors import NonFiniteError
from matsmerge.methods.method import BLOCK_ELEMENTS, Measured, Pass, Site, Task
from matsmerge.methods.passthrough import Passthrough


@dataclass(frozen=True)
class Merged:
    """The result of a job: one flat tensor for each of its pieces, in the output's dtype."""

    job: Job
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Worker:
    """Works on jobs; it has the models' names and offsets, and opens their files itself."""

    alignment: Alignment
    allow_nonfinite: bool

    def merge(self, job: Job, measured: Callable[[Parameter], Measured]) -> Merged:
        """Merge all pieces of a job."""
        self._prefetch(job)
        return Merged(job, tuple(self._merge_piece(p, measured(p.parameter)) for p in job.pieces))

    def observe(self, job: Job, reading: Pass) -> tuple[int, list[Any]]:
        """Note what a pass wants to know; with the job's index, to put notes in order."""
        if reading.spacing is None:
            self._prefetch(job)
        notes = [reading.observe(site) for site in self._sites(job, reading)]
        return job.index, reading.fold(notes) if notes else []

    def _merge_piece(self, piece: Piece, measured: Measured) -> Tensor:
        parameter = piece.parameter
        result = torch.empty(piece.stop - piece.start, dtype=parameter.spec.dtype)
        for start in range(piece.start, piece.stop, BLOCK_ELEMENTS):
            stop = min(start + BLOCK_ELEMENTS, piece.stop)
            if parameter.compute_dtype is None:
                merged = self._source(parameter).read(parameter.name, start, stop)
            else:
                merged = parameter.rule.method.merge(self._site(parameter, start, stop), measured)
            target = result[start - piece.start : stop - piece.start]
            target.copy_(merged)
            if parameter.compute_dtype is not None and not self.allow_nonfinite:
                _check_result(parameter, merged, target)
        return result

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

    def _load(self, parameter: Parameter, start: int, stop: int, model: AlignedModel) -> Tensor:
        block = model.read(parameter.name, start, stop)
        block = block.to(parameter.compute_dtype, copy=True)
        # A sum is the cheapest test: NaN and Inf survive it. It may also overflow, so look twice.
        if (
            not self.allow_nonfinite
            and not block.sum().isfinite()
            and not (finite := block.isfinite()).all()
        ):
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


def _check_result(parameter: Parameter, merged: Tensor, rounded: Tensor) -> None:
    if not rounded.sum(dtype=torch.float64).isfinite():
        raise NonFiniteError(
            f"the merged tensor '{parameter.name}' does not fit into "
            f"{dtype_name(parameter.spec.dtype)} (largest magnitude {merged.abs().max():.4g}); "
            "choose another --dtype, smaller weights, or --allow-nonfinite"
        )
