"""Statistics of the same model on different data, added up."""

from collections.abc import Iterator

from torch import Tensor

from matsmerge.errors import StatisticsError
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.kinds import KINDS
from matsmerge.statistics.kinds.statistic import Form, InputStatistic
from matsmerge.statistics.statistics import Header, Map, Statistics, in_memory
from matsmerge.statistics.totals import Totals, totals_of


def combine(parts: list[Statistics], *, force: bool = False) -> Statistics:
    """Statistics of all the parts' examples, each counting as it did.

    Parts of different models are refused unless forced, and parts collected with different
    options always: their numbers do not mean the same.
    """
    if not parts:
        raise StatisticsError("there is nothing to combine")
    first, *others = parts
    StatisticsError.raise_all(p for part in others for p in _problems(first, part, force=force))
    return add_up(parts)


def add_up(parts: list[Statistics]) -> Statistics:
    """`combine` for parts that are known to belong together."""
    leaders = _common_leaders([part.header.maps for part in parts])
    totals: dict[str, Totals] = {}
    for part in parts:
        for name in part.header.sets:
            own = _regroup(totals_of(part, name), part.header.maps, leaders)
            if totals.setdefault(name, own) is not own:
                totals[name].add(own)
    header = parts[0].header.model_copy(
        update={
            "data": tuple(dict.fromkeys(origin for part in parts for origin in part.header.data)),
            "maps": _maps(parts, leaders),
            "without": _without([part.header for part in parts]),
        }
    )
    return statistics_of(header, totals)


def statistics_of(header: Header, totals: dict[str, Totals]) -> Statistics:
    """Statistics of running totals; the header says all that the totals do not."""
    arrays: dict[str, Tensor] = {}
    forms: dict[str, Form] = {}
    for name, of_set in totals.items():
        for key, values, form in of_set.arrays():
            arrays[f"{name}/{key}"], forms[f"{name}/{key}"] = values, form
    described = {name: of_set.description() for name, of_set in totals.items()}
    return in_memory(header.model_copy(update={"sets": described, "forms": forms}), arrays)


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
    for key in sorted({*CollectionOptions.model_fields} - {"held_out", "seed"}):
        ours, theirs = getattr(a.options, key), getattr(b.options, key)
        if ours != theirs:
            yield f"{labels}: collected with different options, {key} is {ours} and {theirs}"


def _shapes(statistics: Statistics) -> dict[str, int]:
    """How many values each array has, but for gradients kept one by one."""
    specs = statistics.arrays.specs
    return {n: specs[n].num_elements for n in specs if statistics.header.forms[n] == "full"}


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


def _regroup(totals: Totals, maps: tuple[Map, ...], leaders: dict[str, str]) -> Totals:
    """Sums under the names of the common groups."""
    for kind in KINDS.values():
        if isinstance(kind, InputStatistic):
            before = totals.of(kind)
            totals.sums[kind.name] = {
                m.module: before[m.inputs].clone()
                for m in maps
                if leaders.get(m.module) == m.module and m.inputs in before
            }
    return totals


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
