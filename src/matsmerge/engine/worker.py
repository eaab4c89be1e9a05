"""What happens to a job: read blocks, merge or measure them, round the result."""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from matsmerge.checkpoints.alignment import AlignedModel, Alignment
from matsmerge.checkpoints.checkpoint import Buffer, dtype_name
from matsmerge.engine.parameter import Parameter
from matsmerge.engine.plan import Job, Piece, SolveJob, read_by
from matsmerge.engine.solving import LayerSolver
from matsmerge.errors import NonFiniteError, StatisticsError
from matsmerge.linalg.low_rank import nearest_factors
from matsmerge.methods.mats import Mats
from matsmerge.methods.method import BLOCK_ELEMENTS, Measured, Pass, Site, Task
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.methods.passthrough import Passthrough


class Sink(Protocol):
    """Takes merged values; called from many threads or processes, never twice for one element."""

    def write(self, name: str, start: int, values: Tensor) -> None: ...


# Where to write: the merged values, or those after so many iterations of the last solver.
Sinks = Mapping[int | None, Sink]
FINAL = None


@dataclass(frozen=True)
class Receipt:
    """A job's word that its values have been written.

    With the sum of squares of each piece, what there is to say of each layer that was solved, and
    the share of its change that each layer of a LoRA keeps.
    """

    job_index: int
    squares: tuple[float, ...]
    solved: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    energies: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Worker:
    """Works on jobs; it has the models' names and offsets, and opens their files itself."""

    alignment: Alignment
    allow_nonfinite: bool
    evidence: tuple[Evidence, ...] = ()

    def merge(self, job: Job | SolveJob, measured: Mapping[str, Measured], sinks: Sinks) -> Receipt:
        """Merge all pieces of a job into sinks."""
        self._prefetch(job)
        if isinstance(job, SolveJob):
            return self._solve(job, measured, sinks)
        energies: dict[str, float] = {}
        squares = [
            self._merge_piece(p, measured.get(p.parameter.name, {}), sinks, energies)
            for p in job.pieces
        ]
        return Receipt(job.index, tuple(squares), energies=energies)

    def _solve(self, job: SolveJob, measured: Mapping[str, Measured], sinks: Sinks) -> Receipt:
        squares: list[float] = []
        reports: dict[str, list[dict[str, Any]]] = {}
        energies: dict[str, float] = {}
        keep = tuple(at for at in sinks if at is not None)
        for layer in job.layers:
            rule = layer.parameters[0].rule
            own = {p.name: p for p in layer.parameters}
            load = partial(self._load_whole, own)
            solver = LayerSolver(self.evidence, rule.weights, load, keep, len(job.layers))
            start = {name: self._start(p, measured.get(name, {})) for name, p in own.items()}
            try:
                solved = solver.solve(layer, start)
            except StatisticsError as error:
                problems = [f"'{layer.name}': {problem}" for problem in error.problems]
                raise StatisticsError(problems) from error
            reports |= solved.reports
            for at, sink in sinks.items():
                values = solved.values if at is FINAL else solved.kept[at]
                for name, parameter in own.items():
                    self._write_whole(parameter, values[name].flatten(), sink, energies)
            for name in own:
                flat = solved.values[name].flatten()
                squares.append(torch.dot(flat, flat).item())
        return Receipt(job.index, tuple(squares), reports, energies)

    def _start(self, parameter: Parameter, measured: Measured) -> Tensor:
        """A whole parameter as the init has it."""
        method = parameter.rule.method
        assert isinstance(method, Mats)
        num_elements = parameter.spec.num_elements
        values = torch.empty(num_elements, dtype=torch.float64)
        for begin in range(0, num_elements, BLOCK_ELEMENTS):
            end = min(begin + BLOCK_ELEMENTS, num_elements)
            site = self._site(parameter, begin, end, check=not measured)
            values[begin:end] = method.start.merge(site, measured)
        return values.view(parameter.spec.shape)

    def _load_whole(
        self, parameters: Mapping[str, Parameter], model: int | None, name: str
    ) -> Tensor:
        aligned = self.alignment.base if model is None else self.alignment.models[model]
        parameter = parameters[name]
        assert aligned is not None
        check = not self.allow_nonfinite
        flat = self._load(parameter, 0, parameter.spec.num_elements, check, aligned)
        return flat.double().view(parameter.spec.shape)

    def _write_whole(
        self, parameter: Parameter, values: Tensor, sink: Sink, energies: dict[str, float]
    ) -> None:
        """Write a parameter, or the factors of its change; `energies` notes what these keep."""
        if not self.allow_nonfinite:
            _check_result(parameter, values, torch.dot(values, values).item())
        if parameter.lora is None:
            name = parameter.written_as or parameter.name
            sink.write(name, 0, values.to(parameter.spec.dtype).contiguous())
            return
        base = self.alignment.base
        assert base is not None
        start = self._load(parameter, 0, len(values), not self.allow_nonfinite, base)
        change = (values - start).view(parameter.lora.matrix_shape)
        found = nearest_factors(change, parameter.lora.rank)
        energies[parameter.name] = found.energy
        for name, tensor in parameter.lora.tensors(found.left, found.right).items():
            sink.write(name, 0, tensor.view(-1))

    def observe(self, job: Job, reading: Pass) -> tuple[int, list[Any]]:
        """Note what a pass wants to know; with the job's index, to put notes in order."""
        if reading.spacing is None:
            self._prefetch(job)
        notes = [reading.observe(site) for site in self._sites(job, reading)]
        return job.index, reading.fold(notes) if notes else []

    def _merge_piece(
        self, piece: Piece, measured: Measured, sinks: Sinks, energies: dict[str, float]
    ) -> float:
        """Merge a piece, and return the sum of its squares."""
        parameter = piece.parameter
        name = parameter.written_as or parameter.name
        whole: Tensor | None = None
        if parameter.lora is not None:
            whole = torch.empty(parameter.spec.num_elements, dtype=parameter.compute_dtype)
        squares = 0.0
        for start in range(piece.start, piece.stop, BLOCK_ELEMENTS):
            stop = min(start + BLOCK_ELEMENTS, piece.stop)
            if parameter.compute_dtype is None:
                merged = self._source(parameter).read(parameter.name, start, stop)
            else:
                # What was measured has been read before, and checked then.
                site = self._site(parameter, start, stop, check=not measured)
                merged = parameter.rule.method.merge(site, measured)
                square = torch.dot(merged, merged).item()
                if not self.allow_nonfinite:
                    _check_result(parameter, merged, square)
                squares += square
            if whole is not None:
                whole[start:stop] = merged
                continue
            rounded = merged.to(parameter.spec.dtype)
            for sink in sinks.values():
                sink.write(name, start, rounded)
        if whole is not None:
            for sink in sinks.values():
                self._write_whole(parameter, whole, sink, energies)
        return squares

    def _source(self, parameter: Parameter) -> AlignedModel:
        """The model an integer buffer is taken from: they are equal unless one was chosen."""
        method = parameter.rule.method
        name = method.model if isinstance(method, Passthrough) else self.alignment.models[0].name
        return next(m for m in self.alignment.everyone if m.name == name)

    def _sites(self, job: Job, reading: Pass) -> Iterator[Site]:
        position = job.first_element
        for piece in job.pieces:
            if reading.spacing is None:
                starts: Iterable[int] = range(piece.start, piece.stop, reading.block_elements)
            else:
                length = piece.stop - piece.start
                places = _sample_places(position, position + length, reading)
                starts = (piece.start + place - position for place in places)
            for start in starts:
                stop = min(start + reading.block_elements, piece.stop)
                yield self._site(piece.parameter, start, stop, check=True)
            position += piece.stop - piece.start

    def _site(self, parameter: Parameter, start: int, stop: int, *, check: bool) -> Site:
        check = check and not self.allow_nonfinite
        load = partial(self._load, parameter, start, stop, check)
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
        check: bool,
        model: AlignedModel,
        out: Tensor | None = None,
    ) -> Tensor:
        buffer = _buffer(stop - start, model.read_dtype(parameter.name))
        model.read_into(buffer, parameter.name, start)
        block = torch.empty(stop - start, dtype=parameter.compute_dtype) if out is None else out
        block.copy_(buffer.tensor)
        if check and not _is_finite(block, torch.dot(block, block).item()):
            finite = block.isfinite()
            raise NonFiniteError(
                f"{model.checkpoint.label}: tensor '{model.names[parameter.name]}' holds "
                f"{block[~finite][0].item()} (element {start + int((~finite).nonzero()[0])}); "
                "repair the checkpoint, or merge it all the same with --allow-nonfinite"
            )
        return block

    def _prefetch(self, job: Job | SolveJob) -> None:
        if isinstance(job, SolveJob):
            for layer in job.layers:
                for p in layer.parameters:
                    for model in read_by(p, self.alignment):
                        model.prefetch(p.name, 0, p.spec.num_elements)
            return
        for piece in job.pieces:
            for model in read_by(piece.parameter, self.alignment):
                model.prefetch(piece.parameter.name, piece.start, piece.stop)


def _sample_places(begin: int, end: int, reading: Pass) -> Iterator[int]:
    """Where sampled stretches start: one in each interval of the spacing, at a place of its own.

    At even distances they could fall on the same rows of every layer.
    """
    spacing = reading.spacing or 1
    room = max(1, spacing - reading.block_elements)
    for i in range(begin // spacing, end // spacing + 1):
        place = i * spacing + (i * 2654435761 % (1 << 32)) * room // (1 << 32)
        if begin <= place < end:
            yield place


_buffers = threading.local()


def _buffer(num_elements: int, dtype: torch.dtype) -> Buffer:
    """A block as stored, in memory that its thread uses again and again."""
    if num_elements != BLOCK_ELEMENTS:
        return Buffer(num_elements, dtype)
    own: dict[str, Buffer] = _buffers.__dict__
    if str(dtype) not in own:
        own[str(dtype)] = Buffer(num_elements, dtype)
    return own[str(dtype)]


def _is_finite(block: Tensor, square: float) -> bool:
    # NaN and Inf survive a sum of squares, the cheapest test. It may also overflow: look again.
    return math.isfinite(square) or bool(block.isfinite().all())


def _check_result(parameter: Parameter, merged: Tensor, square: float) -> None:
    dtype = parameter.spec.dtype
    limit = torch.finfo(dtype).max
    fits = _is_finite(merged, square)
    if fits and limit < torch.finfo(merged.dtype).max / 2:
        fits = bool(merged.abs().max() <= limit)
    if not fits:
        raise NonFiniteError(
            f"the merged tensor '{parameter.name}' does not fit into {dtype_name(dtype)} (largest "
            f"magnitude {merged.abs().max():.4g}, at most {limit:.4g}); choose another --dtype, "
            "smaller weights, or --allow-nonfinite"
        )
