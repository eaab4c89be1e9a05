"""Statistics put together from others, whose arrays are read where they are."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch

from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint
from matsmerge.checkpoints.filled_checkpoint import FilledCheckpoint, Stored
from matsmerge.statistics.held_tensors import Room, Shelf
from matsmerge.statistics.kinds import KINDS, kind_of
from matsmerge.statistics.kinds.statistic import (
    GradientStatistic,
    InputStatistic,
    OutputStatistic,
)
from matsmerge.statistics.statistics import Map, Set, Statistics


def without_values(statistics: Statistics) -> Statistics:
    """What statistics say of themselves; the arrays are let go, and only their shapes known."""
    arrays = statistics.arrays
    return Statistics(statistics.header, FilledCheckpoint(arrays.label, arrays.specs, {}))


class _KeptArrays(Checkpoint):
    """Arrays in memory while there is room, beyond it in a temporary file."""

    def __init__(self, arrays: Checkpoint, room: Room) -> None:
        shelf = Shelf(room)
        self.label, self.specs, self.aliases = arrays.label, arrays.specs, arrays.aliases
        self._kept = {name: shelf.keep(arrays[name]) for name in arrays.specs}

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        values = self._kept[name].load().reshape(-1)
        buffer.tensor.copy_(values[start : start + len(buffer.tensor)])


def kept_in(statistics: Statistics, room: Room) -> Statistics:
    """The same statistics, whose arrays take no more memory than there is room for."""
    return Statistics(statistics.header, _KeptArrays(statistics.arrays, room))


def share_equal_inputs(statistics: Statistics) -> Statistics:
    """One array in place of those of maps that turn out to have received the same."""
    inputs = [kind for kind in KINDS.values() if isinstance(kind, InputStatistic)]
    arrays = {array for kind in inputs for array in kind.arrays}
    of_leaders: dict[str, list[str]] = defaultdict(list)
    for name in sorted(statistics.arrays.specs):
        if name.split("/")[1] in arrays:
            of_leaders[name.split("/", 2)[2]].append(name)
    leaders: dict[str, str] = {}  # of maps that have arrays, the first with the same values
    firsts: dict[tuple[str, ...], str] = {}
    for m in statistics.header.maps:
        if m.inputs is None or m.inputs in leaders:
            continue
        leaders[m.inputs] = m.inputs
        if m.layout in ("linear", "conv1d"):
            content = tuple(_digest(statistics.arrays, name) for name in of_leaders[m.inputs])
            leaders[m.inputs] = firsts.setdefault(content, m.inputs)
    gone = {n for leader, first in leaders.items() if leader != first for n in of_leaders[leader]}
    header = statistics.header
    kept = [name for name in statistics.arrays.specs if name not in gone]
    keys = {name.partition("/")[2] for name in gone}
    sets = {
        of: s.model_copy(
            update={"num_rows": {k: n for k, n in s.num_rows.items() if k not in keys}}
        )
        for of, s in header.sets.items()
    }
    changes = {
        "maps": tuple(
            m if m.inputs is None else m.model_copy(update={"inputs": leaders[m.inputs]})
            for m in header.maps
        ),
        "sets": sets,
        "forms": {name: header.forms[name] for name in kept},
    }
    places = {name: Stored(statistics.arrays, name) for name in kept}
    return _joined(statistics, places, changes)


def _digest(arrays: Checkpoint, name: str) -> str:
    """What an array is of, and its values in brief."""
    values = arrays[name].contiguous().reshape(-1).view(torch.uint8)
    of, array, _ = name.split("/", 2)
    return f"{of}/{array} {hashlib.sha256(values.numpy().data).hexdigest()}"


def put_together(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of a model's sections as those of the whole; sections share no inputs."""
    first = parts[0].header
    had = {
        kind: {name for p in parts for name in KINDS[kind].parameters(p.header)}
        for kind in first.without
    }
    places = {name: Stored(p.arrays, name) for p in parts for name in p.arrays.specs}
    sets = {
        of: Set(
            num_examples=s.num_examples,
            num_rows={k: n for p in parts for k, n in p.header.sets[of].num_rows.items()},
            marks=next(filter(None, (p.header.sets[of].marks for p in parts)), None),
        )
        for of, s in first.sets.items()
    }
    changes = {
        "maps": tuple(m for p in parts for m in p.header.maps),
        "sets": sets,
        "forms": {name: form for p in parts for name, form in p.header.forms.items()},
        "aliases": {name: kept for p in parts for name, kept in p.header.aliases.items()},
        "without": {
            kind: {
                name: why
                for p in parts
                for name, why in p.header.without.get(kind, {}).items()
                if name not in had[kind]
            }
            for kind in first.without
        },
        # A section of narrow layers has no sketches.
        "sketching": next(filter(None, (p.header.sketching for p in parts)), None),
    }
    return _joined(parts[0], places, changes)


def with_own(inputs: Statistics, own: Statistics) -> Statistics:
    """The second moments of inputs in `inputs`, and all else of a model's own statistics.

    That is how K-FAC goes along a prefix: its input factors are the merged model's, its output
    factors, which would need a backward pass through all later blocks, the model's own.
    """
    places = {name: Stored(inputs.arrays, name) for name in inputs.arrays.specs}
    for name in own.arrays.specs:
        if isinstance(kind_of(name.split("/")[1]), GradientStatistic):
            places[name] = Stored(own.arrays, name)
    outputs = [kind.array for kind in KINDS.values() if isinstance(kind, OutputStatistic)]
    maps = []
    for m in inputs.header.maps:
        other = _map_like(m, own.header.maps)
        maps.append(m.model_copy(update={"outputs": other is not None and other.outputs}))
        for of, array in product(own.header.sets, outputs):
            if other is not None and own.has(f"{array}/{other.module}", of):
                place = Stored(own.arrays, f"{of}/{array}/{other.module}")
                places[f"{of}/{array}/{m.module}"] = place
    of_own = {name: place for name, place in places.items() if place.checkpoint is own.arrays}
    forms = {name: own.header.forms[place.name] for name, place in of_own.items()}
    sets = {
        of: Set(
            num_examples=s.num_examples,
            num_rows=inputs.header.sets[of].num_rows if of in inputs.header.sets else {},
        )
        for of, s in own.header.sets.items()
    }
    aliases = {**own.header.aliases, **inputs.header.aliases}
    forms = {**inputs.header.forms, **forms}
    changes = {"maps": tuple(maps), "sets": sets, "forms": forms, "aliases": aliases}
    return _joined(own, places, changes)


def _joined(first: Statistics, places: Mapping[str, Stored], changes: dict[str, Any]) -> Statistics:
    """Statistics of arrays in several places, with what is different in the first's header."""
    specs = {name: place.checkpoint.specs[place.name] for name, place in places.items()}
    header = first.header.model_copy(update=changes)
    return Statistics(header, FilledCheckpoint(first.arrays.label, specs, places))


def _map_like(m: Map, others: Sequence[Map]) -> Map | None:
    """The same map in statistics of a model whose modules may have other names."""
    found = [o for o in others if (o.weight, o.layout) == (m.weight, m.layout)]
    return next((o for o in found if o.module == m.module), found[0] if len(found) == 1 else None)
