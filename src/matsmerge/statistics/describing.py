"""What statistics say of themselves: which maps they cover, and what has none, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matsmerge.statistics.linear_maps import MAX_FACTOR_OUTPUTS, LinearMap
from matsmerge.statistics.options import Kind, Options
from matsmerge.statistics.parameters import Owned
from matsmerge.statistics.statistics import Map


@dataclass(frozen=True)
class Seen:
    """What is known of a model after its batches."""

    maps: Sequence[LinearMap]
    parameters: Mapping[str, Owned]
    leaders: Mapping[str, str]  # of maps whose inputs are counted
    used: set[str]  # modules
    handled: set[str]  # parameters whose gradients are known for single examples
    # What any of the sets has:
    inputs: set[str]
    outputs: set[str]
    squares: set[str]
    blocks: set[str]


def describe_maps(seen: Seen, names: Mapping[str, str]) -> list[Map]:
    """The linear maps, with their parameters' names as in the checkpoint."""
    owned = {owner: p.name for p in seen.parameters.values() for owner in p.owners}
    maps = []
    for m in seen.maps:
        leader, bias = seen.leaders.get(m.name), owned.get((m.name, "bias"))
        maps.append(
            Map(
                module=m.name,
                layout=m.layout,
                weight=names[owned[m.name, "weight"]],
                bias=None if bias is None else names[bias],
                inputs=leader if leader in seen.inputs else None,
                outputs=m.name in seen.outputs,
            )
        )
    return maps


def find_lacking(
    kind: Kind,
    seen: Seen,
    maps: Sequence[Map],
    names: Mapping[str, str],
    options: Options,
) -> Iterator[tuple[str, str]]:
    """The parameters without a kind of statistic, each with the reason."""
    if kind in ("gram", "kfac"):
        covered = {name for m in maps for name in _covered(m, kind, options)}
    else:
        covered = {names[n] for n in (seen.squares if kind == "fisher" else seen.blocks)}
    weights = {m.weight for m in maps}
    too_wide = {m.weight for m, own in zip(maps, seen.maps, strict=True) if not own.has_factor}
    for owned in seen.parameters.values():
        name = names[owned.name]
        if kind == "block_fisher" and not owned.is_vector:
            yield name, "not a vector"
        elif name in covered:
            continue
        elif not any(module in seen.used for module, _ in owned.owners):
            yield name, "its module is not called on this data"
        elif kind in ("gram", "kfac"):
            if name not in weights:
                yield name, "not the weight of a linear map"
            else:
                yield name, _TOO_WIDE if kind == "kfac" and name in too_wide else _NO_ROWS
        else:
            yield name, "has no part in the loss" if owned.name in seen.handled else _NOT_APART


_TOO_WIDE = f"more than {MAX_FACTOR_OUTPUTS} outputs"
_NO_ROWS = "its input is not one for each example"
_NOT_APART = "its gradient cannot be taken for single examples"


def _covered(m: Map, kind: Kind, options: Options) -> Iterator[str]:
    if m.inputs is not None and (kind == "gram" or m.outputs):
        yield m.weight
        if m.bias and options.bias:
            yield m.bias
