"""What a merge will do, known from headers alone: parameters, jobs and their memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from matsmerge.checkpoints.alignment import AlignedModel, Alignment
from matsmerge.checkpoints.checkpoint import TensorSpec
from matsmerge.engine.adapter_output import AdapterOutput
from matsmerge.engine.layers import Layer, find_layers
from matsmerge.engine.parameter import Parameter
from matsmerge.methods.method import BLOCK_ELEMENTS
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.methods.passthrough import Passthrough
from matsmerge.recipes.rules import Rule

# Fixed, so that an interrupted merge can be resumed under another memory budget.
JOB_ELEMENTS = 128 * BLOCK_ELEMENTS
# Tensors of a block's size that a method holds at once, besides one for each model.
_SCRATCH_BLOCKS = 12
# What a worker needs however small its job is, chiefly its own copy of the interpreter's objects.
_WORKER_BYTES = 24_000_000
# Layers that share their matrices and are solved one after the other by one worker.
_LAYERS_TOGETHER = 8
# Tensors of a layer's size, and matrices of its inputs', that solving holds at once (measured).
_ITERATES, _MATRICES = 12, 9
# Tensors of a weight's size, and second moments of its shorter side, that factoring holds at once.
_CHANGES, _MOMENTS = 4, 4
# What ranking a model's entries collects: a sliver of them, as a value and a count each.
_COLLECTED_SHARE, _COLLECTED_BYTES = 0.02, 16


@dataclass(frozen=True)
class Piece:
    """Elements of one parameter; `start` is a multiple of `BLOCK_ELEMENTS`."""

    parameter: Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class Job:
    """Pieces that are merged together, and the memory that takes."""

    index: int
    first_element: int  # counted over all jobs
    pieces: tuple[Piece, ...]
    num_input_bytes: int
    peak_bytes: int

    @property
    def names(self) -> list[str]:
        """The parameter of each piece."""
        return [piece.parameter.name for piece in self.pieces]


@dataclass(frozen=True)
class SolveJob:
    """Layers that share the matrices of their systems, and the memory that solving one takes."""

    index: int
    layers: tuple[Layer, ...]
    num_input_bytes: int
    peak_bytes: int

    @property
    def names(self) -> list[str]:
        """All parameters, layer by layer."""
        return [p.name for layer in self.layers for p in layer.parameters]


@dataclass(frozen=True)
class Plan:
    """All jobs of a merge, and all that is measured before them."""

    parameters: tuple[Parameter, ...]
    jobs: tuple[Job | SolveJob, ...]
    measured_together: tuple[tuple[Parameter, ...], ...]  # groups measured over the model
    measured_alone: tuple[Parameter, ...]

    @property
    def written(self) -> dict[str, TensorSpec]:
        """All tensors to write, in order."""
        return {name: spec for p in self.parameters for name, spec in p.written.items()}

    @property
    def num_input_bytes(self) -> int:
        return sum(job.num_input_bytes for job in self.jobs)

    @property
    def is_measured(self) -> bool:
        """Whether the inputs are read once more before they are merged."""
        return bool(self.measured_together or self.measured_alone)

    @property
    def measuring_bytes(self) -> int:
        """Memory for what is collected while measuring over the whole model, an upper guess."""
        sizes = [
            sum(p.spec.num_elements for p in group) * len(group[0].rule.weights)
            for group in self.measured_together
        ]
        return int(max(sizes, default=0) * _COLLECTED_SHARE * _COLLECTED_BYTES)

    def peak_bytes(self, num_jobs_at_once: int) -> int:
        """Memory of this many of the largest jobs, beyond the interpreter's own."""
        peaks = sorted((job.peak_bytes for job in self.jobs), reverse=True)
        return sum(peaks[:num_jobs_at_once])


def compute_dtype(stored: Iterable[torch.dtype]) -> torch.dtype:
    """One precision above what is stored, so that rounding the result hides what computing lost.

    `base + (theta - base)` computed in float32 and rounded to bfloat16 is `theta` again, and so is
    it in float64 rounded to float32; but for values thousands of times smaller than the base's.
    """
    return torch.float64 if any(dtype.itemsize > 2 for dtype in stored) else torch.float32


def make_plan(
    alignment: Alignment,
    rules: Mapping[str, Rule],
    dtype: torch.dtype | None,
    evidence: Sequence[Evidence] = (),
    num_kept: int = 0,
    output: AdapterOutput | None = None,
) -> Plan:
    """Plan a merge of aligned models; `num_kept` iterates are written besides the last.

    Of a LoRA only the layers it has are merged and written. All parameters are measured.
    """
    parameters: list[Parameter] = []
    names, layers = (output.names, output.layers) if output else ({}, {})
    for name in alignment.names:
        spec = alignment.models[0].spec(name)
        computed: torch.dtype | None = None
        if spec.dtype.is_floating_point:
            computed = compute_dtype(model.spec(name).dtype for model in alignment.everyone)
            spec = TensorSpec(dtype or spec.dtype, spec.shape)
        parameters.append(
            Parameter(name, spec, computed, rules[name], names.get(name), layers.get(name))
        )

    together: dict[object, list[Parameter]] = {}
    alone: list[Parameter] = []
    for parameter in parameters:
        method = parameter.rule.method
        if parameter.compute_dtype is None or parameter.spec.num_elements == 0:
            continue
        if method.measured_over == "model":
            # Parameters that only differ in, say, their scale are still ranked together.
            key = method.measured_as, parameter.rule.densities
            together.setdefault(key, []).append(parameter)
        elif method.measured_over == "parameter":
            alone.append(parameter)
    if layers:
        parameters = [p for p in parameters if p.lora is not None or p.written_as is not None]
    systems = find_layers(parameters, evidence)
    solved = {p.name for layer in systems for p in layer.parameters}
    solving = list(make_solve_jobs(systems, alignment, num_kept))
    others = [p for p in parameters if p.name not in solved]
    return Plan(
        tuple(parameters),
        (*solving, *make_jobs(others, alignment, len(solving))),
        tuple(map(tuple, together.values())),
        tuple(alone),
    )


def read_by(parameter: Parameter, alignment: Alignment) -> tuple[AlignedModel, ...]:
    """The models a parameter's method reads."""
    method = parameter.rule.method
    if isinstance(method, Passthrough):
        return tuple(m for m in alignment.everyone if m.name == method.model)
    return alignment.everyone if method.reads_base else alignment.models


def make_jobs(
    parameters: Sequence[Parameter], alignment: Alignment, index: int = 0
) -> Iterator[Job]:
    """Cut parameters into pieces and gather pieces into jobs of about the same size."""
    pieces: list[Piece] = []
    num_elements = first_element = 0
    for parameter in parameters:
        start = 0
        while True:
            room = max(
                BLOCK_ELEMENTS, (JOB_ELEMENTS - num_elements) // BLOCK_ELEMENTS * BLOCK_ELEMENTS
            )
            if parameter.lora is not None:
                room = parameter.spec.num_elements  # factors are those of a whole weight
            stop = min(start + room, parameter.spec.num_elements)
            pieces.append(Piece(parameter, start, stop))
            num_elements += stop - start
            if num_elements >= JOB_ELEMENTS:
                yield _job(index, first_element, pieces, alignment)
                index += 1
                first_element += num_elements
                pieces, num_elements = [], 0
            start = stop
            if stop == parameter.spec.num_elements:
                break
    if pieces:
        yield _job(index, first_element, pieces, alignment)


def _job(index: int, first_element: int, pieces: list[Piece], alignment: Alignment) -> Job:
    scratch = max(
        min(p.stop - p.start, BLOCK_ELEMENTS) * (p.parameter.compute_dtype or torch.int8).itemsize
        for p in pieces
    )
    inputs = sum(
        (p.stop - p.start) * model.spec(p.parameter.name).dtype.itemsize
        for p in pieces
        for model in read_by(p.parameter, alignment)
    )
    num_blocks = _SCRATCH_BLOCKS + len(alignment.models)
    factoring = max((_factoring_bytes(p.parameter) for p in pieces), default=0)
    peak = _WORKER_BYTES + num_blocks * scratch + factoring
    return Job(index, first_element, tuple(pieces), inputs, peak)


def _factoring_bytes(parameter: Parameter) -> int:
    """Memory that factoring a weight's change takes."""
    if parameter.lora is None:
        return 0
    side = min(parameter.lora.matrix_shape)
    return 8 * (_CHANGES * parameter.spec.num_elements + _MOMENTS * side * side)


def make_solve_jobs(
    layers: Sequence[Layer], alignment: Alignment, num_kept: int
) -> Iterator[SolveJob]:
    """Gather layers that share matrices; the largest jobs come first, so that none is left over."""
    groups: dict[object, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(layer.shares, []).append(layer)
    chunks = [
        tuple(group[i : i + _LAYERS_TOGETHER])
        for group in groups.values()
        for i in range(0, len(group), _LAYERS_TOGETHER)
    ]
    sizes = [max(_solving_bytes(layer, alignment, num_kept) for layer in c) for c in chunks]
    order = sorted(range(len(chunks)), key=lambda i: -sizes[i] * len(chunks[i]))
    for index, i in enumerate(order):
        inputs = sum(
            model.spec(p.name).num_bytes
            for layer in chunks[i]
            for p in layer.parameters
            for model in read_by(p, alignment)
        )
        inputs += sum(r.found.num_bytes for layer in chunks[i] for r in layer.rounds)
        yield SolveJob(index, chunks[i], inputs, _WORKER_BYTES + sizes[i])


def _solving_bytes(layer: Layer, alignment: Alignment, num_kept: int) -> int:
    """Memory that solving a layer takes at most, an upper guess from its shapes."""
    peak = 0
    num_values = sum(p.spec.num_elements for p in layer.parameters)
    for one in layer.rounds:
        d, o = one.found.num_inputs, one.found.num_outputs
        groups = one.found.view.num_groups
        iterates = (_ITERATES + num_kept) * 8 * groups * d * o
        of_inputs = groups * d * d if one.found.is_dense else 0
        if one.stage.objective.statistic == "kfac":
            # Factors as they are, and turned; of the held-out set as well.
            num_sets = 2 if one.stage.solver.uses_held_out else 1
            num_matrices = 2 * num_sets * len(alignment.models) + _MATRICES
            matrices = 8 * num_matrices * (groups * o * o + of_inputs)
        elif of_inputs or one.stage.solver.needs_matrix:
            matrices = 8 * _MATRICES * groups * d * d
        else:
            matrices = one.found.num_bytes
        peak = max(peak, iterates + matrices)
    peak += 8 * (2 + num_kept) * num_values
    return peak + max(map(_factoring_bytes, layer.parameters))
