"""What a merge will do, known from headers alone: parameters, jobs and their memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch

from matsmerge.adapters.lora import LoraLayer
from matsmerge.checkpoints.alignment import AlignedModel, Alignment
from matsmerge.checkpoints.checkpoint import TensorSpec
from matsmerge.checkpoints.fused_experts import SeparatedExperts
from matsmerge.checkpoints.scaled_floats import Scaled
from matsmerge.engine.adapter_output import AdapterOutput
from matsmerge.engine.devices import PROCESSOR
from matsmerge.errors import AlignmentError, StatisticsError
from matsmerge.methods.layer import Layer
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.methods.site import BLOCK_ELEMENTS, Grain
from matsmerge.problems import noted
from matsmerge.recipes.rules import Rule

# Fixed, so that an interrupted merge can be resumed under another memory budget.
JOB_ELEMENTS = 32 * BLOCK_ELEMENTS
# Tensors of a block's size that a method holds at once, besides one for each model.
_SCRATCH_BLOCKS = 12
# What a worker needs however small its job is, chiefly its own copy of the interpreter's objects.
_WORKER_BYTES = 24_000_000
# Layers that share their matrices and are solved one after the other by one worker.
_LAYERS_TOGETHER = 8
# Tensors of a weight's size, and second moments of its shorter side, that factoring holds at once.
_CHANGES, _MOMENTS = 4, 4
# What ranking a model's entries collects: a sliver of them, as a value and a count each.
_COLLECTED_SHARE, _COLLECTED_BYTES = 0.02, 16


@dataclass(frozen=True)
class Parameter:
    """One parameter that is merged, how, and what is written of it.

    That is the tensor itself, perhaps under another name, or the factors of its change. Of fused
    experts it is a part of the tensor `fused`, from the element `written_from` on.
    """

    name: str
    spec: TensorSpec
    compute_dtype: torch.dtype | None  # None: not a number to merge, copied as it is
    rule: Rule
    written_as: str
    lora: LoraLayer | None
    written_from: int = 0
    fused: TensorSpec | None = None
    scaled: Scaled | None = None  # how it is written in FP8, where it is

    @property
    def is_merged(self) -> bool:
        """Whether it holds numbers that are merged, and not copied."""
        return self.compute_dtype is not None and self.spec.num_elements > 0

    @property
    def written(self) -> dict[str, TensorSpec]:
        """The tensors to write."""
        if self.lora:
            return self.lora.specs
        if self.scaled:
            return self.scaled.specs(self.written_as, self.spec.shape)
        return {self.written_as: self.fused or self.spec}


@dataclass(frozen=True)
class PlannedSite:
    """A site that will be merged: elements of one parameter, or all parameters of a layer.

    A stretch may be longer than a block here; its `start` is a multiple of `BLOCK_ELEMENTS`.
    """

    parameters: tuple[Parameter, ...]
    start: int
    stop: int
    layer: Layer | None = None

    @property
    def parameter(self) -> Parameter:
        return self.parameters[0]

    def span(self, parameter: Parameter) -> tuple[int, int]:
        """The elements of one of its parameters; of a layer's other parameters, all."""
        is_first = parameter is self.parameter
        return (self.start, self.stop) if is_first else (0, parameter.spec.num_elements)

    @property
    def grain(self) -> Grain:
        method = self.parameter.rule.method
        return Grain.LAYER if self.layer else method.fallback.grain

    @property
    def needs_float64(self) -> bool:
        """Whether it is merged in float64, as whatever is decomposed or solved for is."""
        first = self.parameter
        is_decomposed = self.grain is not Grain.STRETCH or first.lora is not None
        return first.is_merged and (is_decomposed or first.compute_dtype == torch.float64)


@dataclass(frozen=True)
class Job:
    """Sites that are merged one after the other by one worker, and the memory that takes."""

    index: int
    first_element: int  # counted over all jobs
    sites: tuple[PlannedSite, ...]
    num_input_bytes: int
    peak_bytes: int
    device: str = PROCESSOR

    @property
    def names(self) -> list[str]:
        """All parameters, site by site."""
        return [p.name for site in self.sites for p in site.parameters]

    @property
    def num_layers(self) -> int:
        return sum(site.layer is not None for site in self.sites)


@dataclass(frozen=True)
class Plan:
    """All jobs of a merge, and all that is measured before them."""

    parameters: tuple[Parameter, ...]
    jobs: tuple[Job, ...]
    measured_together: tuple[tuple[Parameter, ...], ...]  # groups measured over the model
    measured_alone: tuple[Parameter, ...]

    @property
    def layers(self) -> list[Layer]:
        """Everything that is merged as a layer."""
        return [site.layer for job in self.jobs for site in job.sites if site.layer]

    @property
    def otherwise(self) -> list[Parameter]:
        """Parameters whose method merges layers, but has none for them."""
        layered = {name for layer in self.layers for name in layer.parameters}
        return [
            p
            for p in self.parameters
            if p.rule.method.grain is Grain.LAYER and p.compute_dtype is not None
            if p.name not in layered
        ]

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
    output: AdapterOutput,
    evidence: Sequence[Evidence] = (),
    num_kept: int = 0,
    scaled: Mapping[str, Scaled] | None = None,
) -> Plan:
    """Plan a merge of aligned models; `num_kept` iterates are written besides the last.

    Of a LoRA only the layers it has are merged and written. All parameters are measured. What is
    `scaled` is written in FP8.
    """
    parameters: list[Parameter] = []
    fused = _fused_experts(alignment)
    for name in alignment.names:
        spec = alignment.models[0].spec(name)
        computed: torch.dtype | None = None
        if spec.dtype.is_floating_point:
            stored = [model.spec(name).dtype for model in alignment.everyone]
            computed = compute_dtype(stored)
            spec = TensorSpec(dtype or reduce(torch.promote_types, stored), spec.shape)
        written_as, lora = output.names.get(name, name), output.layers.get(name)
        place: tuple[int, TensorSpec | None] = 0, None
        if name in fused:
            (written_as, start), whole = fused[name]
            place = start, TensorSpec(spec.dtype, whole)
        how = scaled.get(name) if scaled else None
        if how is not None and how.ending is None:
            spec, how = TensorSpec(how.dtype, spec.shape), None
        parameters.append(
            Parameter(name, spec, computed, rules[name], written_as, lora, *place, how)
        )

    together: dict[object, list[Parameter]] = {}
    alone: list[Parameter] = []
    for parameter in parameters:
        method = parameter.rule.method
        if not parameter.is_merged:
            continue
        if method.measured_over == "model":
            # Parameters that only differ in, say, their scale are still ranked together.
            key = method.measured_as, parameter.rule.shares, parameter.rule.models
            together.setdefault(key, []).append(parameter)
        elif method.measured_over == "parameter":
            alone.append(parameter)
    if output.layers:
        written = output.layers.keys() | output.names.keys()
        parameters = [p for p in parameters if p.name in written]
    layers = find_all_layers(parameters, evidence)
    by_name = {p.name: p for p in parameters}
    layered = {name for layer in layers for name in layer.parameters}
    first = make_layer_jobs(layers, by_name, alignment, num_kept)
    others = [p for p in parameters if p.name not in layered]
    return Plan(
        tuple(parameters),
        (*first, *make_jobs(others, alignment, len(first))),
        tuple(map(tuple, together.values())),
        tuple(alone),
    )


def _fused_experts(alignment: Alignment) -> dict[str, tuple[tuple[str, int], tuple[int, ...]]]:
    """Where to write experts that the base stores fused: tensor, first element, whole shape."""
    like = alignment.base or alignment.models[0]
    checkpoint = like.checkpoint
    if not isinstance(checkpoint, SeparatedExperts):
        return {}
    shared = {own: name for name, own in like.names.items()}
    pieces = checkpoint.pieces
    written = {piece.tensor for own, piece in pieces.items() if own in shared}
    AlignmentError.raise_all(
        f"{checkpoint.label}: '{own}' is a part of '{piece.tensor}', and other parts are merged; "
        "name all of them as heads, or none"
        for own, piece in pieces.items()
        if piece.tensor in written and own not in shared
    )
    return {
        shared[own]: ((piece.tensor, piece.start), checkpoint.fused.specs[piece.tensor].shape)
        for own, piece in pieces.items()
        if own in shared
    }


def find_all_layers(parameters: Sequence[Parameter], evidence: Sequence[Evidence]) -> list[Layer]:
    """The layers of all methods that merge such; every problem at once."""
    by_name = {p.name: p for p in parameters}
    of_rules: dict[Rule, list[str]] = {}
    for parameter in parameters:
        of_rules.setdefault(parameter.rule, []).append(parameter.name)
    layers: list[Layer] = []
    problems: list[str] = []
    for rule, names in of_rules.items():
        with noted(problems, StatisticsError):
            layers += rule.method.layers(dict.fromkeys(names), by_name, evidence)
    StatisticsError.raise_all(problems)
    return layers


def read_by(parameter: Parameter, alignment: Alignment) -> tuple[AlignedModel, ...]:
    """The models a parameter's method reads."""
    method = parameter.rule.method
    if method.only_model is not None:
        return tuple(m for m in alignment.everyone if m.name == method.only_model)
    taking = taking_part(parameter.rule, alignment)
    return (*taking, alignment.base) if method.reads_base and alignment.base else taking


def taking_part(rule: Rule, alignment: Alignment) -> tuple[AlignedModel, ...]:
    """The models that take part in the parameters of a rule."""
    return tuple(m for m in alignment.models if m.name in rule.models)


def make_jobs(
    parameters: Sequence[Parameter], alignment: Alignment, index: int = 0
) -> Iterator[Job]:
    """Cut parameters into sites and gather these into jobs of about the same size."""
    sites: list[PlannedSite] = []
    num_elements = first_element = 0
    for parameter in parameters:
        # Factors are those of a whole weight, and so may scales be.
        is_apart = parameter.lora is not None or parameter.scaled is not None
        is_whole = is_apart or _is_tensor_merged(parameter)
        start = 0
        while True:
            room = max(
                BLOCK_ELEMENTS, (JOB_ELEMENTS - num_elements) // BLOCK_ELEMENTS * BLOCK_ELEMENTS
            )
            if is_whole:
                room = parameter.spec.num_elements
            stop = min(start + room, parameter.spec.num_elements)
            sites.append(PlannedSite((parameter,), start, stop))
            num_elements += stop - start
            if num_elements >= JOB_ELEMENTS:
                yield _job(index, first_element, sites, alignment)
                index += 1
                first_element += num_elements
                sites, num_elements = [], 0
            start = stop
            if stop == parameter.spec.num_elements:
                break
    if sites:
        yield _job(index, first_element, sites, alignment)


def _is_tensor_merged(parameter: Parameter) -> bool:
    return parameter.is_merged and parameter.rule.method.fallback.grain is Grain.TENSOR


def _job(
    index: int,
    first_element: int,
    sites: Sequence[PlannedSite],
    alignment: Alignment,
    num_kept: int = 0,
) -> Job:
    num_input_bytes = sum(site.layer.num_statistics_bytes for site in sites if site.layer)
    for site in sites:
        for p in site.parameters:
            start, stop = site.span(p)
            sizes = [model.spec(p.name).dtype.itemsize for model in read_by(p, alignment)]
            num_input_bytes += (stop - start) * sum(sizes)
    peak = max(_site_bytes(site, len(alignment.models), num_kept) for site in sites)
    return Job(index, first_element, tuple(sites), num_input_bytes, _WORKER_BYTES + peak)


def _site_bytes(site: PlannedSite, num_models: int, num_kept: int) -> int:
    """Memory that merging a site takes."""
    first = site.parameter
    method = first.rule.method
    if site.layer is not None:
        init = method.tensor_bytes(first.spec.shape, num_models)
        merging = site.layer.peak_bytes(num_models, num_kept) + init
    elif _is_tensor_merged(first):
        merging = method.fallback.tensor_bytes(first.spec.shape, num_models)
    else:
        size = min(site.stop - site.start, BLOCK_ELEMENTS)
        item = (first.compute_dtype or torch.int8).itemsize
        merging = (_SCRATCH_BLOCKS + num_models) * size * item
    return merging + max(map(_writing_bytes, site.parameters))


def _writing_bytes(parameter: Parameter) -> int:
    """Memory that factoring a weight's change, or bringing it into FP8, takes."""
    if parameter.lora is None:
        return parameter.scaled.encoding_bytes(parameter.spec.shape) if parameter.scaled else 0
    side = min(parameter.lora.matrix_shape)
    return 8 * (_CHANGES * parameter.spec.num_elements + _MOMENTS * side * side)


def make_layer_jobs(
    layers: Sequence[Layer],
    parameters: Mapping[str, Parameter],
    alignment: Alignment,
    num_kept: int,
) -> list[Job]:
    """Gather layers that share matrices; the largest jobs come first, so that none is left over."""
    groups: dict[object, list[PlannedSite]] = {}
    for layer in layers:
        own = tuple(parameters[name] for name in layer.parameters)
        key = (own[0].rule, layer.sharing) if layer.sharing else layer.name
        groups.setdefault(key, []).append(PlannedSite(own, 0, own[0].spec.num_elements, layer))
    jobs = [
        _job(0, 0, group[i : i + _LAYERS_TOGETHER], alignment, num_kept)
        for group in groups.values()
        for i in range(0, len(group), _LAYERS_TOGETHER)
    ]
    jobs.sort(key=lambda job: -(job.peak_bytes - _WORKER_BYTES) * len(job.sites))
    return [replace(job, index=index) for index, job in enumerate(jobs)]
