"""The work on a job: its sites are read, merged or measured, rounded and written."""

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from matsmerge.checkpoints.alignment import AlignedModel, Alignment
from matsmerge.checkpoints.checkpoint import Buffer, dtype_name
from matsmerge.checkpoints.scaled_floats import ScaledWriter
from matsmerge.engine.devices import PROCESSOR, has_float64
from matsmerge.engine.plan import Job, Parameter, PlannedSite, read_by, taking_part
from matsmerge.errors import NonFiniteError
from matsmerge.linalg.low_rank import nearest_factors
from matsmerge.methods.layer import LayerWork
from matsmerge.methods.method import Pass, merge_whole, values_of
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.methods.site import BLOCK_ELEMENTS, Grain, Measured, MergedSite, Site, SiteTask


class Sink(Protocol):
    """Takes merged values; called from many threads or processes, never twice for one element."""

    def write(self, name: str, start: int, values: Tensor) -> None: ...

    def flush(self) -> None:
        """Let what this copy was given reach the place where all will see it."""


# Where to write: the merged values, or those after so many iterations of the last solver.
Sinks = Mapping[int | None, Sink]
FINAL = None


@dataclass
class Receipt:
    """The record of a job all of whose values have been written.

    The sum of squares of each parameter of each site, what methods reported on parameters, and the
    share of its change that each layer of a LoRA keeps.
    """

    job_index: int
    squares: list[float] = field(default_factory=list)
    reports: dict[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    energies: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Worker:
    """Merges and measures jobs, in any thread or process; a copy opens the models' files itself."""

    alignment: Alignment
    allow_nonfinite: bool
    evidence: tuple[Evidence, ...] = ()

    def merge(self, job: Job, measured: Mapping[str, Measured], sinks: Sinks) -> Receipt:
        """Merge all sites of a job into sinks."""
        self._prefetch(job)
        receipt = Receipt(job.index)
        for planned in job.sites:
            parameter = planned.parameter
            if parameter.compute_dtype is None:
                self._copy(planned, sinks)
                receipt.squares.append(0.0)
            elif not parameter.is_merged or (
                planned.grain is Grain.STRETCH and parameter.lora is None
            ):
                device = _device_of(planned, job.device)
                site = self._site(planned, parameter, measured, device)
                receipt.squares.append(self._merge_stretches(parameter, site, sinks))
            else:
                self._merge_whole(planned, measured, sinks, job, receipt)
        for sink in sinks.values():
            sink.flush()
        return receipt

    def _copy(self, planned: PlannedSite, sinks: Sinks) -> None:
        """Take what is not merged from one model: they are equal unless one was chosen."""
        parameter = planned.parameter
        name = parameter.rule.method.only_model or parameter.rule.models[0]
        source = next(m for m in self.alignment.everyone if m.name == name)
        for start in range(planned.start, planned.stop, BLOCK_ELEMENTS):
            stop = min(start + BLOCK_ELEMENTS, planned.stop)
            values = source.read(parameter.name, start, stop).to(parameter.spec.dtype)
            for sink in sinks.values():
                sink.write(parameter.written_as, parameter.written_from + start, values)

    def _merge_stretches(self, parameter: Parameter, site: Site, sinks: Sinks) -> float:
        """Merge and write one stretch after the other; returns the sum of squares."""
        method = parameter.rule.method.fallback
        write = _writer(parameter, sinks.values())
        squares = 0.0
        for part in site.stretches():
            merged = values_of(method.merge(part), part)
            square = torch.dot(merged, merged).item()
            if not self.allow_nonfinite:
                _check_result(parameter, merged, square)
            squares += square
            write(part.start, merged)
        return squares

    def _merge_whole(
        self,
        planned: PlannedSite,
        measured: Mapping[str, Measured],
        sinks: Sinks,
        job: Job,
        receipt: Receipt,
    ) -> None:
        """Merge a layer or a tensor, and write it when it is complete."""
        own = {p.name: p for p in planned.parameters}
        device = _device_of(planned, job.device)
        sites = {name: self._site(planned, p, measured, device) for name, p in own.items()}
        site = sites[planned.parameter.name]
        method = planned.parameter.rule.method
        if planned.layer is not None:
            keep = tuple(at for at in sinks if at is not None)
            evidence = tuple(one.on(device) for one in self.evidence)
            work = LayerWork(planned.layer, sites, evidence, keep, len(job.sites))
            merged = method.merge(replace(site, layer=work))
            assert isinstance(merged, MergedSite), "a layer has several parameters"
        elif planned.grain is Grain.TENSOR:
            found = method.fallback.merge(site)
            merged = found if isinstance(found, MergedSite) else MergedSite({site.parameter: found})
        else:
            merged = MergedSite({site.parameter: merge_whole(method.fallback, site)})
        receipt.reports |= merged.reports
        for at, sink in sinks.items():
            values = merged.values if at is FINAL else merged.kept.get(at, merged.values)
            for name, parameter in own.items():
                self._write_whole(parameter, values[name].flatten(), sink, receipt.energies)
        for name in own:
            flat = merged.values[name].flatten()
            receipt.squares.append(torch.dot(flat, flat).item())

    def _write_whole(
        self, parameter: Parameter, values: Tensor, sink: Sink, energies: dict[str, float]
    ) -> None:
        """Write a parameter, or the factors of its change; `energies` notes what these keep."""
        if not self.allow_nonfinite:
            _check_result(parameter, values, torch.dot(values, values).item())
        if parameter.lora is None:
            _writer(parameter, [sink])(0, values)
            return
        base = self.alignment.base
        assert base is not None
        device = str(values.device)
        start = self._read(parameter, not self.allow_nonfinite, device, base, 0, len(values))
        change = (values - start).view(parameter.lora.matrix_shape)
        found = nearest_factors(change, parameter.lora.rank)
        energies[parameter.name] = found.energy
        for name, tensor in parameter.lora.tensors(found.left, found.right).items():
            sink.write(name, 0, tensor.cpu().view(-1))

    def start_of(self, parameter: Parameter, measured: Mapping[str, Measured]) -> Tensor:
        """The values of a parameter that its method starts from."""
        planned = PlannedSite((parameter,), 0, parameter.spec.num_elements)
        site = self._site(planned, parameter, measured, PROCESSOR)
        return merge_whole(parameter.rule.method.start, site).view(site.shape)

    def observe(self, job: Job, reading: Pass) -> tuple[int, list[Any]]:
        """The notes of a pass over a job's sites, with the job's index to put notes in order.

        On the processor: whatever is noted of a value takes less time than to read it.
        """
        if reading.spacing is None:
            self._prefetch(job)
        notes = [reading.observe(site) for site in self._observed(job, reading)]
        return job.index, reading.fold(notes) if notes else []

    def _observed(self, job: Job, reading: Pass) -> Iterator[Site]:
        position = job.first_element
        for planned in job.sites:
            whole = self._site(planned, planned.parameter, {}, PROCESSOR)
            length = planned.stop - planned.start
            if reading.spacing is None:
                starts: Iterable[int] = range(planned.start, planned.stop, reading.block_elements)
            else:
                places = _sample_places(position, position + length, reading)
                starts = (planned.start + place - position for place in places)
            for start in starts:
                yield whole.part(start, min(start + reading.block_elements, planned.stop))
            position += length

    def _site(
        self,
        planned: PlannedSite,
        parameter: Parameter,
        measured: Mapping[str, Measured],
        device: str,
    ) -> Site:
        """A parameter's site on a device; a layer's other parameters are whole."""
        rule, known = parameter.rule, measured.get(parameter.name, {})
        # What was measured has been read before, and checked then.
        read = partial(self._read, parameter, not known and not self.allow_nonfinite, device)
        start, stop = planned.span(parameter)
        taking = taking_part(rule, self.alignment)
        models = zip(taking, rule.weights, rule.shares, strict=True)
        return Site(
            parameter.name,
            tuple(parameter.spec.shape),
            start,
            stop,
            tuple(SiteTask(m.name, w, s, start, stop, partial(read, m)) for m, w, s in models),
            partial(read, self.alignment.base),
            known,
        )

    def _read(
        self,
        parameter: Parameter,
        check: bool,
        device: str,
        model: AlignedModel,
        start: int,
        stop: int,
        out: Tensor | None = None,
    ) -> Tensor:
        checkpoint, name = model.checkpoint, model.names[parameter.name]
        buffer = _buffer(stop - start, checkpoint.read_dtype(name), device)
        checkpoint.read_into(buffer, name, start)
        if out is None:
            out = torch.empty(stop - start, dtype=parameter.compute_dtype, device=device)
        out.copy_(buffer.on_device())  # whose dtype is changed there
        # A device would have to be waited for.
        block = out if device == PROCESSOR else buffer.tensor
        if check and not is_finite(block, torch.dot(block, block).item()):
            finite = block.isfinite()
            raise NonFiniteError(
                f"{checkpoint.label}: tensor '{name}' holds "
                f"{block[~finite][0].item()} (element {start + int((~finite).nonzero()[0])}); "
                "repair the checkpoint, or merge it all the same with --allow-nonfinite"
            )
        return out

    def _prefetch(self, job: Job) -> None:
        for planned in job.sites:
            for p in planned.parameters:
                for model in read_by(p, self.alignment):
                    model.checkpoint.prefetch(model.names[p.name], *planned.span(p))


def _writer(parameter: Parameter, sinks: Collection[Sink]) -> Callable[[int, Tensor], None]:
    """A function that writes a parameter's merged values from some element on, in their order."""

    def write(name: str, start: int, values: Tensor) -> None:
        for sink in sinks:
            sink.write(name, parameter.written_from + start, values)

    def round_and_write(start: int, values: Tensor) -> None:
        write(parameter.written_as, start, values.to(parameter.spec.dtype).cpu().contiguous())

    if parameter.scaled is None:
        return round_and_write
    shape = parameter.spec.shape
    return ScaledWriter(parameter.scaled, parameter.written_as, shape, write).take


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


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.of_blocks: dict[torch.dtype, Buffer] = {}
        self.last: dict[torch.dtype, tuple[int, Buffer]] = {}  # how many elements, and their memory


_buffers = _Buffers()


def _buffer(num_elements: int, dtype: torch.dtype, device: str) -> Buffer:
    """A block as stored, or less, in memory that its thread uses again and again.

    On the way to a device it may still be read while the next block is.
    """
    if num_elements > BLOCK_ELEMENTS or device != PROCESSOR:
        return Buffer(num_elements, dtype, device)
    length, part = _buffers.last.get(dtype, (None, None))
    if part is None or length != num_elements:
        found = _buffers.of_blocks.get(dtype)
        if found is None:
            found = _buffers.of_blocks[dtype] = Buffer(BLOCK_ELEMENTS, dtype)
        part = found.first(num_elements)
        _buffers.last[dtype] = num_elements, part
    return part


def _device_of(planned: PlannedSite, device: str) -> str:
    """Where a site is merged: on its job's device, unless that lacks the precision."""
    return PROCESSOR if planned.needs_float64 and not has_float64(device) else device


def is_finite(block: Tensor, square: float) -> bool:
    """Whether all values are finite, by their sum of squares."""
    # NaN and Inf survive a sum of squares, the cheapest test. It may also overflow: look again.
    return math.isfinite(square) or bool(block.isfinite().all())


def _check_result(parameter: Parameter, merged: Tensor, square: float) -> None:
    dtype = parameter.spec.dtype
    limit = torch.finfo(dtype).max
    fits = is_finite(merged, square)
    if fits and limit < torch.finfo(merged.dtype).max / 2:
        fits = bool(merged.abs().max() <= limit)
    if not fits:
        raise NonFiniteError(
            f"the merged tensor '{parameter.name}' does not fit into {dtype_name(dtype)} (largest "
            f"magnitude {merged.abs().max():.4g}, at most {limit:.4g}); choose another --dtype, "
            "smaller weights, or --allow-nonfinite"
        )
