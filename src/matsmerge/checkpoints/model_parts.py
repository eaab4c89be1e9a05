"""Language models beside larger models that contain one of the same shape.

    model.layers.0.mlp.up_proj.weight                   the language model
    model.language_model.layers.0.mlp.up_proj.weight    the same in a model that sees
    model.visual.blocks.0.attn.qkv.weight               what only that one has: a tower

The language model is completed with the towers of the larger one, which are not merged but copied.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from matsmerge.checkpoints.alignment import common_prefix, has_row_per_token
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.filled_checkpoint import FilledCheckpoint, Stored
from matsmerge.problems import counted, listed

_LEAST_SHARE = 0.9  # of a model's names that have to be found; what is not is said by aligning
_NUMBER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Completed:
    """Models that all have the names of the largest."""

    models: Mapping[str, Checkpoint]
    base: Checkpoint | None
    whole: Checkpoint | None = None  # the largest, if others are a part of it
    copied: Mapping[str, str] = field(default_factory=dict)  # parameter -> model it is taken from
    notes: tuple[str, ...] = ()


def complete_models(models: Mapping[str, Checkpoint], base: Checkpoint | None) -> Completed:
    """Complete models that are a part of another one; what is not one is left as it is."""
    everyone = {**models, **({"base": base} if base else {})}
    for owner, whole in everyone.items():
        parts = {n: find_part(whole, c) for n, c in everyone.items() if n != owner}
        found = {name: part for name, part in parts.items() if part}
        if not found:
            continue
        notes: list[str] = []
        copied: dict[str, str] = {}
        for name, (outer, inner) in found.items():
            lacking = _towers(whole, everyone[name], outer, inner)
            copied |= dict.fromkeys(lacking, owner)
            everyone[name] = _complete(everyone[name], whole, outer, inner, lacking)
            notes.append(f"{name}: its '{inner}*' was read as '{outer}*' of {owner}")
        towers = list(dict.fromkeys(".".join(n.split(".")[:2]) for n in copied))
        notes.append(
            f"copied from {owner}, not merged, since {' and '.join(found)} has none of them: "
            f"{counted(list(copied), 'tensor')} of {listed(towers)}"
        )
        base = everyone.pop("base", None)
        return Completed(everyone, base, whole, copied, tuple(notes))
    return Completed(models, base)


def find_part(whole: Checkpoint, part: Checkpoint) -> tuple[str, str] | None:
    """The prefixes, in the whole and in the part, of the language model that both have.

    None if it is no part of the other, or has no tower less: heads are no towers.
    """
    larger, smaller = {*whole.specs, *whole.aliases}, {*part.specs, *part.aliases}
    if len(larger) <= len(smaller) or len(larger & smaller) > len(smaller) / 2:
        return None
    best: tuple[int, str, str] | None = None
    for inner in sorted({"", *(n.partition(".")[0] + "." for n in smaller)}):
        outer = common_prefix([n[len(inner) :] for n in smaller if n.startswith(inner)], larger)
        if outer:
            num = sum(rename(n, outer, inner, larger) in larger for n in smaller)
            best = max(best or (0, "", ""), (num, outer, inner))
    if best is None or best[0] < _LEAST_SHARE * len(smaller):
        return None
    _, outer, inner = best
    towers = _towers(whole, part, outer, inner)
    return (outer, inner) if any(_NUMBER.search(n) for n in towers) else None


def _towers(whole: Checkpoint, part: Checkpoint, outer: str, inner: str) -> list[str]:
    """What is in modules of the whole that the part has not, tokens' rows excepted."""
    names = {*part.specs, *part.aliases}
    covered = {rename(n, outer, inner, whole.specs) for n in names}
    modules = tuple(
        {f"{outer}{n[len(inner) :].partition('.')[0]}." for n in names if n.startswith(inner)}
    )
    others = (n for n in whole.specs if n not in covered and not n.startswith(modules))
    return [n for n in others if not has_row_per_token(n)]


def rename(name: str, outer: str, inner: str, known: Collection[str]) -> str:
    """A name of the part in the whole."""
    renamed = outer + name[len(inner) :] if name.startswith(inner) else name
    return renamed if renamed in known else name


def _complete(
    part: Checkpoint, whole: Checkpoint, outer: str, inner: str, towers: Collection[str]
) -> FilledCheckpoint:
    """The part under the names of the whole, with its towers."""
    names = {**{n: n for n in part.specs}, **part.aliases}
    own = {rename(n, outer, inner, whole.specs): Stored(part, t) for n, t in names.items()}
    own = {n: s for n, s in own.items() if n in whole.specs or n in part.specs}
    found = {**own, **{n: Stored(whole, n) for n in towers}}
    ordered = {n: found[n] for n in (*whole.specs, *own) if n in found}
    specs = {n: stored.checkpoint.specs[stored.name] for n, stored in ordered.items()}
    return FilledCheckpoint(part.label, specs, ordered, of=part)
