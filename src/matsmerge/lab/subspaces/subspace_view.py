"""Task parameter subspaces, layer by layer: their spectra, their overlap, and what a merge did.

A layer is one second moment of inputs and the weights that are multiplied with these inputs. Every
second moment is decomposed once, and no more than one of them is in memory in full.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from matsmerge.checkpoints.alignment import match_prefix, matches
from matsmerge.checkpoints.checkpoint import FLOAT_DTYPES, Checkpoint, TensorSpec
from matsmerge.errors import NonFiniteError, RecipeError, StatisticsError, closest
from matsmerge.lab.subspaces.subspace_findings import (
    Distance,
    LayerView,
    SubspaceSize,
    SubspaceView,
    TaskSpectrum,
)
from matsmerge.linalg.subspaces import (
    Directions,
    energies,
    find_directions,
    overlap,
    overlap_at_random,
    split,
)
from matsmerge.linalg.triangle import triangle_dim
from matsmerge.problems import noted
from matsmerge.progress import AnyProgress, Progress, listener
from matsmerge.statistics.linear_maps import MapLayout
from matsmerge.statistics.spectra import spectrum
from matsmerge.statistics.statistics import MAIN, Map, Statistics, check_belongs

_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class SubspaceTask:
    """A task by its statistics, and the model they were collected from, if it is looked at."""

    name: str
    statistics: Statistics
    model: Checkpoint | None = None


@dataclass(frozen=True)
class _Subjects:
    """The tasks, and the merged model and base if there are any."""

    tasks: Sequence[SubspaceTask]
    merged: Checkpoint | None
    base: Checkpoint | None
    base_names: Mapping[str, str]  # weight -> its name in the base


@dataclass(frozen=True)
class _Layer:
    """The maps with one input, by task, in the same order."""

    maps: tuple[tuple[Map, ...], ...]
    grams: tuple[TensorSpec, ...]  # the stored second moments of this input, by task

    @property
    def dim(self) -> int:
        return triangle_dim(self.grams[0].shape[0])


@dataclass(frozen=True)
class PreparedView:
    """A view that has been checked; nothing but headers has been read."""

    subjects: _Subjects
    size: SubspaceSize
    layers: Sequence[_Layer]
    skipped: Mapping[str, Sequence[str]]

    @property
    def num_bytes(self) -> int:
        """Bytes of second moments to decompose."""
        return sum(gram.num_bytes for layer in self.layers for gram in layer.grams)

    def run(self, progress: AnyProgress | None = None) -> SubspaceView:
        """Decompose and compare."""
        subjects = self.subjects
        told = listener(progress)
        told.stage("decomposing", self.num_bytes)
        return SubspaceView(
            tuple(task.name for task in subjects.tasks),
            self.size,
            None if subjects.merged is None else "model" if subjects.base is None else "base",
            tuple(_see(subjects, layer, self.size, told) for layer in self.layers),
            self.skipped,
        )


def prepare_view(
    tasks: Sequence[SubspaceTask],
    merged: Checkpoint | None = None,
    base: Checkpoint | None = None,
    *,
    size: SubspaceSize | None = None,
    layers: Sequence[str] = (),
    force: bool = False,
) -> PreparedView:
    """Check from headers what can be compared.

    With `merged` weights every task needs its model. `layers` are patterns of modules or weights.
    `force` takes statistics of other models for these models'.
    """
    if merged is not None and any(task.model is None for task in tasks):
        raise RecipeError("merged weights can only be compared with the models they were made of")
    _check_statistics(tasks, force=force)
    tables = [_maps_by_weight(task.statistics) for task in tasks]
    _check_patterns(layers, [m for table in tables for m in table.values()])
    subjects = _Subjects(tasks, merged, base, _names_in(base, tasks[0].model))
    found: dict[tuple[str | None, ...], list[tuple[Map, ...]]] = defaultdict(list)
    skipped: dict[str, list[str]] = defaultdict(list)
    for key in dict.fromkeys(key for table in tables for key in table):
        maps = tuple(table[key] for table in tables if key in table)
        if layers and not any(_is_asked_for(m, layers) for m in maps):
            continue
        if why := _why_skipped(subjects, maps):
            skipped[why].append(maps[0].weight)
        else:
            found[tuple(m.inputs for m in maps)].append(maps)
    if not found:
        files = ", ".join(task.statistics.arrays.label for task in tasks)
        reasons = "; ".join(f"{len(weights)} {why}" for why, weights in skipped.items())
        raise StatisticsError(f"{files}: there is no linear map to look at ({reasons})")
    chosen = [
        _Layer(tuple(zip(*group, strict=True)), tuple(_grams(tasks, group[0])))
        for group in found.values()
    ]
    return PreparedView(subjects, size or SubspaceSize(), chosen, dict(skipped))


def _check_statistics(tasks: Sequence[SubspaceTask], *, force: bool) -> None:
    problems: list[str] = []
    for task in tasks:
        header, label = task.statistics.header, task.statistics.arrays.label
        if all(m.inputs is None for m in header.maps):
            problems.append(
                f"{label}: holds no Gram matrix, only {', '.join(task.statistics.kinds)}; collect "
                "with --statistics gram"
            )
        if task.model is not None and not force:
            with noted(problems, StatisticsError):
                check_belongs(task.statistics, task.model)
    StatisticsError.raise_all(problems)


def _maps_by_weight(statistics: Statistics) -> dict[tuple[str, MapLayout, int], Map]:
    """The maps by their weight's name in the checkpoint; a tied weight has several, numbered."""
    maps: dict[tuple[str, MapLayout, int], Map] = {}
    num_uses: Counter[tuple[str, MapLayout]] = Counter()
    for m in statistics.header.maps:
        maps[m.weight, m.layout, num_uses[m.weight, m.layout]] = m
        num_uses[m.weight, m.layout] += 1
    return maps


def _is_asked_for(m: Map, patterns: Sequence[str]) -> bool:
    return matches(m.module, patterns) or matches(m.weight, patterns)


def _check_patterns(patterns: Sequence[str], maps: Sequence[Map]) -> None:
    modules = dict.fromkeys(m.module for m in maps)
    RecipeError.raise_all(
        f"layers: '{pattern}' matches no linear map{closest(pattern, modules)}"
        for pattern in patterns
        if not any(_is_asked_for(m, [pattern]) for m in maps)
    )


def _names_in(base: Checkpoint | None, model: Checkpoint | None) -> dict[str, str]:
    """The base's names by the models', which may have a leading module more, as `bert.`."""
    if base is None or model is None:
        return {}
    table = {name: name for name in base.specs} | dict(base.aliases)
    rename, _ = match_prefix(model, table)
    return {rename(name): name for name in table}


def _why_skipped(subjects: _Subjects, maps: Sequence[Map]) -> str | None:
    """Why a weight is not looked at, if so; `maps` are those of the tasks that have it."""
    if maps[0].layout == "embedding":
        return "of embeddings, whose directions are tokens"
    if len(maps) < len(subjects.tasks):
        return "not in every task's statistics"
    pairs = zip(subjects.tasks, maps, strict=True)
    if not all(task.statistics.has(f"inputs/{m.inputs}") for task, m in pairs):
        return "without a Gram matrix in every task's statistics"
    shapes = {spec.shape for spec in _grams(subjects.tasks, maps)}
    if any(len(shape) > 1 for shape in shapes):
        return "of convolutions in groups, each with a Gram matrix of its own"
    if len(shapes) > 1:
        return "with inputs of another size in some tasks"
    return _why_not_comparable(subjects, maps[0], triangle_dim(shapes.pop()[0]))


def _why_not_comparable(subjects: _Subjects, m: Map, dim: int) -> str | None:
    if subjects.merged is None:
        return None
    checkpoints = [(subjects.merged, m.weight, "the merged model")]
    checkpoints += [(task.model, m.weight, "every model") for task in subjects.tasks if task.model]
    if subjects.base is not None:
        checkpoints.append((subjects.base, subjects.base_names.get(m.weight, ""), "the base"))
    wanted = None
    for checkpoint, name, title in checkpoints:
        if name not in checkpoint.specs and name not in checkpoint.aliases:
            return f"not in {title}"
        spec = checkpoint.spec(name)
        if spec.dtype not in FLOAT_DTYPES:
            return f"not of floating point numbers in {title}"
        wanted = wanted or spec.shape
        if spec.shape != wanted or _num_inputs(spec.shape, m.layout) != dim:
            return f"of another shape in {title}"
    return None


def _grams(tasks: Sequence[SubspaceTask], maps: Sequence[Map]) -> list[TensorSpec]:
    """What is stored for each task's map: a triangle (packed,), or one per group."""
    pairs = zip(tasks, maps, strict=True)
    return [task.statistics.arrays.specs[f"{MAIN}/inputs/{m.inputs}"] for task, m in pairs]


def _num_inputs(shape: tuple[int, ...], layout: MapLayout) -> int:
    if layout == "conv2d":
        return math.prod(shape[1:])
    if len(shape) != 2:
        return 0
    return shape[1] if layout == "linear" else shape[0]


def _see(subjects: _Subjects, layer: _Layer, size: SubspaceSize, progress: Progress) -> LayerView:
    """Decompose a layer's second moments, one task at a time, and compare their subspaces."""
    spectra: list[TaskSpectrum] = []
    bases: list[Tensor] = []
    distances: list[tuple[Distance, ...]] = []
    for task, maps, stored in zip(subjects.tasks, layer.maps, layer.grams, strict=True):
        module, label = maps[0].module, task.statistics.arrays.label
        gram = _finite(
            task.statistics.gram(module),
            f"{label}: the Gram matrix of '{module}'",
            "; look at the model's activations and collect it again",
        )
        directions = find_directions(gram)
        k = size.of(directions)
        spectra.append(
            TaskSpectrum(
                directions.values,
                spectrum(directions.values).effective_rank,
                directions.num_holding(size.energy),
                k,
                directions.share(k),
            )
        )
        bases.append(directions.top(k))
        compared = maps if subjects.merged is not None else ()
        distances.append(tuple(_distance(subjects, task, m, directions, k) for m in compared))
        progress.advance(stored.num_bytes)
    ranks = [found.rank for found in spectra]
    return LayerView(
        layer.maps[0][0].module,
        tuple(m.weight for m in layer.maps[0]),
        layer.dim,
        tuple(spectra),
        tuple(tuple(overlap(a, b) for b in bases) for a in bases),
        tuple(tuple(overlap_at_random(a, b, layer.dim) for b in ranks) for a in ranks),
        tuple(distances),
    )


def _distance(
    subjects: _Subjects, task: SubspaceTask, m: Map, directions: Directions, k: int
) -> Distance:
    assert subjects.merged is not None
    assert task.model is not None
    sources = [(task.model, m.weight), (subjects.merged, m.weight)]
    if subjects.base is not None:
        sources.append((subjects.base, subjects.base_names[m.weight]))
    moved = own = torch.zeros_like(directions.values)
    square = 0.0
    for rows in zip(*(_row_blocks(c, name, m.layout) for c, name in sources), strict=True):
        moved = moved + energies(rows[1] - rows[0], directions)
        own = own + energies(rows[0], directions)
        square += float((rows[0] - rows[2] if len(rows) > 2 else rows[0]).square().sum())
    change, size = split(moved, directions, k), math.sqrt(square)
    return Distance(
        m.weight,
        _relative(change.inside, size),
        _relative(change.outside, size),
        _relative(change.at_outputs, split(own, directions, k).at_outputs),
        k / len(directions.values),
    )


def _row_blocks(
    checkpoint: Checkpoint, name: str, layout: MapLayout
) -> Iterator[Tensor]:  # (some of out, in)
    """A weight as the matrix its inputs are multiplied with: a block of outputs at a time.

    Some have as many outputs as there are tokens, and float64 copies of them would not fit.
    """
    shape, what = checkpoint.spec(name).shape, f"{checkpoint.label}: tensor '{name}'"
    if layout == "conv1d":  # (in, out), whose columns are not together in the file
        yield _finite(checkpoint[name].double().mT, what)
        return
    num_inputs = math.prod(shape[1:])
    stored = checkpoint.aliases.get(name, name)
    step = max(1, _BLOCK_ELEMENTS // num_inputs)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        block = checkpoint.read(stored, start * num_inputs, stop * num_inputs)
        yield _finite(block.double().view(-1, num_inputs), what)


def _finite(values: Tensor, what: str, advice: str = "") -> Tensor:
    if not torch.isfinite(values).all():
        raise NonFiniteError(f"{what} holds NaN or Inf{advice}")
    return values


def _relative(value: float, size: float) -> float:
    if size:
        return value / size
    return math.nan if value else 0.0
