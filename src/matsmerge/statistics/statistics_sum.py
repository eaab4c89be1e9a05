"""Statistics of the same model on different data, added up."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from matsmerge.errors import StatisticsError
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.kinds import KINDS
from matsmerge.statistics.kinds.sketch_sum import scaled, without_constant
from matsmerge.statistics.kinds.statistic import InputStatistic, Statistic, StoredTensor
from matsmerge.statistics.statistics import Header, Map, Statistics, Summed, statistics_of


def combine_statistics(parts: list[Statistics], *, force: bool = False) -> Statistics:
    """Statistics of all the parts' examples, each counting as it did.

    Parts of different models are refused unless forced, and parts collected with different
    options always: their numbers do not mean the same.
    """
    if not parts:
        raise StatisticsError("there is nothing to combine")
    first, *others = parts
    StatisticsError.raise_all(p for part in others for p in _problems(first, part, force=force))
    return add_up(parts)


@dataclass(frozen=True)
class _Place:
    """Where a part has statistics of a map or parameter, whose name in other parts may differ."""

    part: Statistics
    of: str  # the set
    name: str

    def count(self, kind: Statistic[Any]) -> int:
        """How many rows or examples the mean is over."""
        described = self.part.header.sets[self.of]
        if kind.is_per_row:
            return described.num_rows[f"{kind.array}/{self.name}"]
        return described.num_examples

    def has(self, array: str) -> bool:
        return self.part.has(f"{array}/{self.name}", self.of)

    def sum(self, kind: Statistic[Any], array: str, *, keeps_mean: bool) -> StoredTensor:
        """What the mean was made from; gradients of single examples are as they were.

        Without the mean input, a sketch is not of inputs with a constant 1 either.
        """
        key = f"{array}/{self.name}"
        values = self.part.stored(key, self.of).double()
        form = self.part.header.forms[f"{self.of}/{key}"]
        is_kept = form in ("sketch", "wide")
        if is_kept and array == "inputs" and self.has("mean") and not keeps_mean:
            mean = self.part.stored(f"mean/{self.name}", self.of)
            values = without_constant((values, form), mean)
        if form == "sketch":
            return scaled(values, self.count(kind)), form
        return (values if form == "rows" else values * self.count(kind)), form


def add_up(parts: list[Statistics]) -> Statistics:
    """`combine` for parts that are known to belong together."""
    leaders = _common_leaders([part.header.maps for part in parts])
    sets, marks = {}, {}
    for of in dict.fromkeys(of for part in parts for of in part.header.sets):
        having = [part for part in parts if of in part.header.sets]
        num_examples = sum(part.header.sets[of].num_examples for part in having)
        sets[of] = num_examples, _summed(having, of, leaders)
        own = [part.header.sets[of].marks for part in having]
        marks[of] = reduce(add, filter(None, own)) if any(own) else None
    changes = {
        "data": tuple(dict.fromkeys(origin for part in parts for origin in part.header.data)),
        "maps": _maps(parts, leaders),
        "without": _without([part.header for part in parts]),
        # A part without examples has no sketches, and says nothing of them.
        "sketching": next(filter(None, (part.header.sketching for part in parts)), None),
    }
    return statistics_of(parts[0].header.model_copy(update=changes), sets, marks)


def _summed(parts: list[Statistics], of: str, leaders: dict[str, str]) -> Iterator[Summed]:
    """The sums of one set over all parts; an array must be in each part that has the statistic."""
    for kind in KINDS.values():
        for name, places in _places(kind, parts, of, leaders).items():
            arrays = [array for array in kind.arrays if all(p.has(array) for p in places)]
            keeps_mean = "mean" in arrays
            sums = {
                array: kind.add_up([p.sum(kind, array, keeps_mean=keeps_mean) for p in places])
                for array in arrays
            }
            yield Summed(kind, name, sum(p.count(kind) for p in places), sums)


def _places(
    kind: Statistic[Any], parts: list[Statistics], of: str, leaders: dict[str, str]
) -> dict[str, list[_Place]]:
    """The maps or parameters that have a statistic, each with where the parts have it."""
    found: dict[str, list[_Place]] = defaultdict(list)
    for part in parts:
        if isinstance(kind, InputStatistic):
            maps = [m for m in part.header.maps if leaders.get(m.module) == m.module]
            names = [(m.module, m.inputs) for m in maps if m.inputs is not None]
        else:
            prefix = f"{of}/{kind.array}/"
            keys = [key for key in part.header.forms if key.startswith(prefix)]
            names = [(name, name) for name in (key.removeprefix(prefix) for key in keys)]
        for name, own in names:
            if part.has(f"{kind.array}/{own}", of):
                found[name].append(_Place(part, of, own))
    return found


def _problems(first: Statistics, other: Statistics, *, force: bool) -> Iterator[str]:
    """What speaks against adding one to the other."""
    a, b = first.header, other.header
    labels = f"{first.arrays.label} and {other.arrays.label}"
    if a.model.fingerprint != b.model.fingerprint and not force:
        yield (
            f"{labels}: collected from different models, '{a.model.name}' "
            f"({a.model.fingerprint[:16]}) and '{b.model.name}' ({b.model.fingerprint[:16]}); "
            "add them all the same with --force"
        )
    twice = {o.fingerprint for o in a.data} & {o.fingerprint for o in b.data} - {""}
    if twice and not force:
        yield (
            f"{labels}: collected on the same data, which would count twice; add them all the "
            "same with --force"
        )
    shapes = _shapes(first), _shapes(other)
    unlike = [n for n in shapes[0] if shapes[1].get(n, shapes[0][n]) != shapes[0][n]]
    if unlike:
        yield (
            f"{labels}: of models of different shapes, '{unlike[0]}' has {shapes[0][unlike[0]]} "
            f"and {shapes[1][unlike[0]]} values"
        )
    if a.sketching != b.sketching:
        yield (
            f"{labels}: kept in different ways, {_described(a)} and {_described(b)}, which cannot "
            "be added; bring both to one rank with mats stats compress"
        )
    for key in sorted({*CollectionOptions.model_fields} - {"held_out", "seed", "rank"}):
        ours, theirs = getattr(a.options, key), getattr(b.options, key)
        if ours != theirs:
            yield f"{labels}: collected with different options, {key} is {ours} and {theirs}"


def _shapes(statistics: Statistics) -> dict[str, int]:
    """How many values each array has, but for gradients kept one by one; of a sketch, inputs."""
    specs, forms = statistics.arrays.specs, statistics.header.forms
    full = {n: specs[n].num_elements for n in specs if forms[n] == "full"}
    means = [n for n in specs if n.split("/")[1] == "mean"]
    with_mean = {n.replace("/mean/", "/inputs/", 1) for n in means}
    sketches = [n for n in specs if forms[n] == "sketch"]
    return full | {n: specs[n].shape[0] - (n in with_mean) for n in sketches}


def _described(header: Header) -> str:
    sketching = header.sketching
    if sketching is None:
        return "second moments in full"
    return f"sketches of rank {sketching.rank}"


def _common_leaders(all_maps: list[tuple[Map, ...]]) -> dict[str, str]:
    """Maps share an input only if they do in every part."""
    keys: dict[str, list[str | None]] = {}
    for i, maps in enumerate(all_maps):
        for m in maps:
            keys.setdefault(m.module, [None] * len(all_maps))[i] = m.inputs
    leaders: dict[tuple[str | None, ...], str] = {}
    return {
        m: leaders.setdefault(tuple(key), m)
        for m, key in keys.items()
        if any(name is not None for name in key)
    }


def _maps(parts: list[Statistics], leaders: dict[str, str]) -> tuple[Map, ...]:
    found: dict[str, Map] = {}
    for part in parts:
        for m in part.header.maps:
            before = found.get(m.module, m)
            outputs = m.outputs or before.outputs
            found[m.module] = m.model_copy(
                update={"inputs": leaders.get(m.module), "outputs": outputs}
            )
    return tuple(found.values())


def _without(headers: list[Header]) -> dict[str, dict[str, str]]:
    """What no part has."""
    return {
        kind: {
            p: why for p, why in own.items() if all(p in h.without.get(kind, {}) for h in headers)
        }
        for kind, own in headers[0].without.items()
    }
