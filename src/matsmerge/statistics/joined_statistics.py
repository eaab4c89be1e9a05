"""Statistics put together from others, whose arrays are read where they are."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.statistics.kinds import KINDS, kind_of
from matsmerge.statistics.kinds.statistic import GradientStatistic, OutputStatistic
from matsmerge.statistics.statistics import Map, Set, Statistics

_Places = Mapping[str, tuple[Checkpoint, str]]  # of each array, and its name there


class _Joined(Checkpoint):
    """Arrays of several checkpoints, or of none: then only their shapes are known."""

    def __init__(self, label: str, specs: Mapping[str, TensorSpec], places: _Places) -> None:
        self.label, self.specs, self.aliases = label, specs, {}
        self._places = places

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        arrays, own_name = self._places[name]
        arrays.read_into(buffer, own_name, start)


def without_values(statistics: Statistics) -> Statistics:
    """What statistics say of themselves; the arrays are let go."""
    arrays = statistics.arrays
    return Statistics(statistics.header, _Joined(arrays.label, arrays.specs, {}))


def put_together(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of a model's sections as those of the whole; sections share no inputs."""
    first = parts[0].header
    places: _Places = {name: (p.arrays, name) for p in parts for name in p.arrays.specs}
    sets = {
        of: Set(
            num_examples=s.num_examples,
            num_rows={k: n for p in parts for k, n in p.header.sets[of].num_rows.items()},
        )
        for of, s in first.sets.items()
    }
    changes = {
        "maps": tuple(m for p in parts for m in p.header.maps),
        "sets": sets,
        "forms": {name: form for p in parts for name, form in p.header.forms.items()},
        "aliases": {name: kept for p in parts for name, kept in p.header.aliases.items()},
        "without": {
            kind: {n: why for p in parts for n, why in p.header.without.get(kind, {}).items()}
            for kind in first.without
        },
    }
    return _joined(parts[0], places, changes)


def with_own(inputs: Statistics, own: Statistics) -> Statistics:
    """The second moments of inputs in `inputs`, and all else of a model's own statistics.

    That is how K-FAC goes along a prefix: its input factors are the merged model's, its output
    factors, which would need a backward pass through all later blocks, the model's own.
    """
    places = {name: (inputs.arrays, name) for name in inputs.arrays.specs}
    for name in own.arrays.specs:
        if isinstance(kind_of(name.split("/")[1]), GradientStatistic):
            places[name] = own.arrays, name
    forms = dict(inputs.header.forms)
    outputs = [kind.array for kind in KINDS.values() if isinstance(kind, OutputStatistic)]
    maps = []
    for m in inputs.header.maps:
        other = _map_like(m, own.header.maps)
        maps.append(m.model_copy(update={"outputs": other is not None and other.outputs}))
        for of, array in product(own.header.sets, outputs):
            if other is not None and own.has(f"{array}/{other.module}", of):
                places[f"{of}/{array}/{m.module}"] = own.arrays, f"{of}/{array}/{other.module}"
    forms |= {
        name: own.header.forms[own_name]
        for name, (arrays, own_name) in places.items()
        if arrays is own.arrays
    }
    sets = {
        of: Set(
            num_examples=s.num_examples,
            num_rows=inputs.header.sets[of].num_rows if of in inputs.header.sets else {},
        )
        for of, s in own.header.sets.items()
    }
    aliases = {**own.header.aliases, **inputs.header.aliases}
    changes = {"maps": tuple(maps), "sets": sets, "forms": forms, "aliases": aliases}
    return _joined(own, places, changes)


def _joined(first: Statistics, places: _Places, changes: dict[str, Any]) -> Statistics:
    """Statistics of arrays in several places, with what is different in the first's header."""
    specs = {name: arrays.specs[own_name] for name, (arrays, own_name) in places.items()}
    header = first.header.model_copy(update=changes)
    return Statistics(header, _Joined(first.arrays.label, specs, places))


def _map_like(m: Map, others: Sequence[Map]) -> Map | None:
    """The same map in statistics of a model whose modules may have other names."""
    found = [o for o in others if (o.weight, o.layout) == (m.weight, m.layout)]
    return next((o for o in found if o.module == m.module), found[0] if len(found) == 1 else None)
