"""Layers that belong to one task alone, and are kept with its head instead of being merged.

Two kinds: what not all models have in the same shape, known from headers; and what fine-tuning
learnt from scratch though the base has it, such as a pooler that pre-training never used, known
from how far it moved.
"""

import re
from collections.abc import Collection, Iterable, Sequence

from matsmerge.advice.task_vectors import TaskVectors
from matsmerge.checkpoints.alignment import match_prefix
from matsmerge.checkpoints.checkpoint import FLOAT_DTYPES, Checkpoint

# A layer that was initialised anew has a cosine of about 0 with the base's, one that was fine-tuned
# a cosine near 1: half way is far from both.
UNRELATED_COSINE = 0.5
# The pooler of all-MiniLM-L6-v2, which pre-training never used, moved 8 to 19 times as far as the
# median of the matrices of the same model, in five models; other layers at most 2.2 times as far.
FRESH_RATIO = 4.0
# Of a model that hardly moved, ratios say little.
FRESH_CHANGE = 0.02

_NUMBERED = re.compile(r"(?:^|\.)\d+(?:\.|$)")
# Rows for tokens and positions are inputs, and never a head.
_NEVER_OWN = re.compile(r"embed|wte|wpe|shared|lm_head|vocab|position", re.IGNORECASE)
_MOST_OWN = 0.5  # share of a model's parameters; with more, models have other architectures


def name_tables(everyone: Sequence[Checkpoint]) -> list[dict[str, str]]:
    """The tensors of each checkpoint, by the names that the first one has for them."""
    return [_shared_names(everyone[0], checkpoint) for checkpoint in everyone]


def find_unshared(everyone: Sequence[Checkpoint]) -> list[str]:
    """Parameters that some of models and base lack, or that differ in their number of outputs.

    None of them where that is most of a model: then models do not fit, which aligning says.
    """
    tables, found = name_tables(everyone), []
    modules = {_module_of(name) for table in tables for name in table}
    for name in dict.fromkeys(n for table in tables for n in table):
        specs = [c.specs[t[name]] for c, t in zip(everyone, tables, strict=True) if name in t]
        if any(spec.dtype not in FLOAT_DTYPES for spec in specs) or _NEVER_OWN.search(name):
            continue
        lacking = [table for table in tables if name not in table]
        is_missing = bool(lacking) and not _is_of_stack(name, lacking)
        other_outputs = len({s.shape for s in specs}) > 1 and len({s.shape[1:] for s in specs}) == 1
        if is_missing or (other_outputs and not _is_in_stack(_module_of(name), modules)):
            found.append(name)
    sizes = {n: everyone[0].specs[t].num_elements for n, t in tables[0].items()}
    share = sum(sizes.get(name, 0) for name in found) / max(1, sum(sizes.values()))
    return found if share <= _MOST_OWN else []


def _shared_names(reference: Checkpoint, checkpoint: Checkpoint) -> dict[str, str]:
    table = {n: n for n in checkpoint.specs} | dict(checkpoint.aliases)
    rename, _ = match_prefix(reference, table)
    return {rename(n): target for n, target in table.items()}


def _is_of_stack(name: str, lacking: Iterable[Collection[str]]) -> bool:
    """Is it of a numbered layer, of which those that lack it have others?"""
    number = _NUMBERED.search(name)
    return number is not None and any(
        other.startswith(name[: number.start()]) for table in lacking for other in table
    )


def _is_in_stack(module: str, modules: Collection[str]) -> bool:
    """Is it of numbered layers? A `classifier.1` that is all there is of `classifier` is a head."""
    number = _NUMBERED.search(module)
    if number is None or number.end() < len(module):
        return number is not None
    stack = module.removesuffix(module.rpartition(".")[2])
    return any(other != module and other.startswith(stack) for other in modules)


def find_fresh(vectors: TaskVectors) -> dict[str, float]:
    """Modules outside of the numbered layers that were learnt from scratch, by how far they moved.

    One is enough that no longer resembles the base's in some model, or that moved much farther than
    most matrices did in most models.
    """
    found: dict[str, float] = {}
    modules: dict[str, list[str]] = {}
    for name in vectors.products:
        modules.setdefault(_module_of(name), []).append(name)
    typical = vectors.typical_changes
    for module, names in modules.items():
        matrices = [name for name in names if name in vectors.matrices]
        if not matrices or _is_in_stack(module, modules) or _NEVER_OWN.search(module):
            continue
        geometry = vectors.of(matrices)
        changes = geometry.changes
        is_other = any(cosine < UNRELATED_COSINE for cosine in geometry.cosines_with_base)
        stand_out = [
            change >= max(FRESH_CHANGE, FRESH_RATIO * usual)
            for change, usual in zip(changes, typical, strict=True)
        ]
        if is_other or 2 * sum(stand_out) > len(stand_out):
            found[module] = max(changes)
    return found


def in_modules(names: Iterable[str], modules: Collection[str]) -> list[str]:
    """The parameters that are directly in some of these modules."""
    return [name for name in names if _module_of(name) in modules]


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def make_patterns(own: Sequence[str], everything: Iterable[str]) -> list[str]:
    """Patterns that match these parameters and no others; of whole modules one pattern each."""
    others = set(everything) - set(own)
    patterns: dict[str, None] = {}
    for name in own:
        parts = name.split(".")
        prefixes = (".".join(parts[:depth]) + "." for depth in range(1, len(parts)))
        whole = (p for p in prefixes if not any(other.startswith(p) for other in others))
        prefix = next(whole, None)
        patterns[_escape(name) if prefix is None else f"{_escape(prefix)}*"] = None
    return list(patterns)


def _escape(text: str) -> str:
    """A name as a shell-style pattern that matches it alone."""
    return re.sub(r"([*?\[])", r"[\1]", text)
