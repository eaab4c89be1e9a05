"""Do these models fit together? Answered from headers, with every difference at once."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec, dtype_name
from matsmerge.checkpoints.fused_experts import match_experts, separate_experts
from matsmerge.errors import AlignmentError
from matsmerge.problems import counted, listed

# Models with other rows, from models and the tensors of each, by the names that all share.
RowViews = Callable[
    [Mapping[str, Checkpoint], Mapping[str, Mapping[str, str]]], dict[str, Checkpoint]
]

_COMPARE_ELEMENTS = 1 << 20
_COUNTER = "num_batches_tracked"
_MAX_PREFIX_PARTS = 8  # modules that a checkpoint's names may have in front of another's


@dataclass(frozen=True)
class AlignedModel:
    """A checkpoint under the names all models share."""

    name: str
    checkpoint: Checkpoint
    names: Mapping[str, str]  # shared name -> name in the checkpoint
    heads: tuple[str, ...]  # names in the checkpoint of what belongs to this model alone

    def spec(self, name: str) -> TensorSpec:
        return self.checkpoint.specs[self.names[name]]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.checkpoint.read(self.names[name], start, stop)


@dataclass(frozen=True)
class Alignment:
    """Models that fit: the parameters they share, in the order of the first model's file."""

    models: tuple[AlignedModel, ...]
    base: AlignedModel | None
    names: tuple[str, ...]
    tied: Mapping[str, str]  # other name -> shared name
    notes: tuple[str, ...]  # what was decided without being asked

    @property
    def everyone(self) -> tuple[AlignedModel, ...]:
        return (*self.models, self.base) if self.base else self.models


def align(
    models: Mapping[str, Checkpoint],
    base: Checkpoint | None,
    *,
    heads: Sequence[str] = (),
    may_mix_dtypes: bool = False,
    may_differ: Callable[[str], bool] = lambda _: False,
    tokenizer_problems: Sequence[str] = (),
    experts_apart: bool = True,
    view_rows: RowViews | None = None,
) -> Alignment:
    """Match tensors over all models and the base.

    `heads` are patterns of parameters each model keeps for itself. `may_differ` says of which
    integer buffers nobody needs equality. `tokenizer_problems` are reasons not to merge embeddings,
    said together with the others. Fused experts are parameters of their own, unless tensors are
    wanted as they are stored. `view_rows` brings embeddings to one vocabulary.
    """
    if experts_apart:
        models = {name: separate_experts(model) for name, model in models.items()}
        base = separate_experts(base) if base else None
    everyone = dict(models) | ({"base": base} if base else {})
    reference = next(iter(models.values()))
    if base is not None and match_experts(base.specs, reference.specs):
        reference = base  # the output is laid out as it is
    notes = [f"{name}: {c.note}" for name, c in everyone.items() if c.note]
    tables: dict[str, dict[str, str]] = {}  # model -> any of its names -> name in its file
    for name, checkpoint in everyone.items():
        table = {n: n for n in checkpoint.specs} | dict(checkpoint.aliases)
        renamed = match_experts(reference.specs, table)
        if renamed:
            table = {renamed(n): target for n, target in table.items()}
            notes.append(f"{name}: its experts were read as those of {reference.label} are called")
        rename, note = match_prefix(reference, table)
        if note:
            notes.append(f"{name}: {note}")
        tables[name] = {rename(n): target for n, target in table.items()}
    if view_rows is not None:
        everyone = view_rows(everyone, tables)

    known = {name for table in tables.values() for name in table}
    AlignmentError.raise_all(
        f"the head pattern '{pattern}' matches no parameter, e.g. {min(known)}"
        for pattern in unmatched(heads, known)
    )
    own: dict[str, dict[str, str]] = {}
    for name, table in tables.items():
        own[name] = {n: table.pop(n) for n in list(table) if matches(n, heads)}
    tied = _drop_tied(tables)
    found = _find_heads(everyone, tables)
    if found:
        for name, table in tables.items():
            own[name] |= {n: table.pop(n) for n in list(table) if n in found}
        notes.append(
            "kept apart as each model's own head, not merged (they differ in size, or the base "
            f"lacks them): {listed(sorted(found))}"
        )

    unused = _unused_buffers(base, tables)
    if unused:
        notes.append(f"buffers of the base that no model has, not used: {listed(unused)}")
    AlignmentError.raise_all([*_differences(everyone, tables, may_mix_dtypes), *tokenizer_problems])
    aligned = {
        name: AlignedModel(name, checkpoint, tables[name], _own_names(own[name], checkpoint))
        for name, checkpoint in everyone.items()
    }
    shared = tuple(tables[next(iter(models))])
    if not shared:
        raise AlignmentError("no parameters are left to merge: the head patterns match all of them")
    differing = {n: _compare_exact(n, aligned) for n in shared if not may_differ(n)}
    if any(found for n, found in differing.items() if _is_counter(n)):
        notes.append(
            f"how many batches each was trained on (*.{_COUNTER}) is taken from one model; it "
            "changes nothing that is computed"
        )
    AlignmentError.raise_all(
        problem for n, found in differing.items() if not _is_counter(n) for problem in found
    )
    return Alignment(
        models=tuple(aligned[name] for name in models),
        base=aligned["base"] if base else None,
        names=shared,
        tied=tied,
        notes=tuple(notes),
    )


def _unused_buffers(base: Checkpoint | None, tables: Mapping[str, dict[str, str]]) -> list[str]:
    """Drop integer buffers that only the base has; position ids are no longer saved, say."""
    if base is None:
        return []
    others = [table for name, table in tables.items() if name != "base"]
    unused = [
        name
        for name, target in tables["base"].items()
        if not base.specs[target].dtype.is_floating_point and not any(name in t for t in others)
    ]
    for name in unused:
        del tables["base"][name]
    return unused


def _own_names(own: Mapping[str, str], checkpoint: Checkpoint) -> tuple[str, ...]:
    """A head's names in its checkpoint, tied ones under the name that was asked for."""
    known = {*checkpoint.specs, *checkpoint.aliases}
    return tuple(name if name in known else target for name, target in own.items())


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Does a parameter's name match one of the shell-style patterns?"""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unmatched(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """The patterns that match none of the names."""
    return [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]


def _title(name: str, checkpoint: Checkpoint) -> str:
    return (
        checkpoint.label if name in (checkpoint.label, "base") else f"{name} ({checkpoint.label})"
    )


def match_prefix(
    reference: Checkpoint, table: Mapping[str, str]
) -> tuple[Callable[[str], str], str | None]:
    """A renaming for checkpoints that only differ by a leading module, as `bert.` with and without.

    Transformers saves the bare encoder and the same encoder under a head this way. Of several
    prefixes that would do, the one that fits most names is taken.
    """
    wanted = {*reference.specs, *reference.aliases}
    if wanted & table.keys():
        return str, None
    longer = common_prefix(table, wanted)
    if longer:
        return longer.__add__, f"its names were read with '{longer}' in front"
    shorter = common_prefix(wanted, table)
    if shorter:
        rename: Callable[[str], str] = lambda name: name.removeprefix(shorter)  # noqa: E731
        return rename, f"its names were read without the leading '{shorter}'"
    return str, None


def common_prefix(names: Iterable[str], prefixed: Iterable[str]) -> str | None:
    """The prefix that turns most of the names into ones that are there."""
    bare = set(names)
    counts: dict[str, int] = {}
    for name in prefixed:
        end = 0
        for _ in range(_MAX_PREFIX_PARTS):
            end = name.find(".", end) + 1
            if not end:
                break
            if name[end:] in bare:
                counts[name[:end]] = counts.get(name[:end], 0) + 1
    return max(sorted(counts), key=lambda prefix: counts[prefix], default=None)


def _drop_tied(tables: Mapping[str, dict[str, str]]) -> dict[str, str]:
    """Leave one name of every tied weight: the first that all models know.

    What is tied in one model and not in another is two parameters, and both names stay.
    """
    tied: dict[str, str] = {}
    for table in tables.values():
        groups: dict[str, list[str]] = {}
        for name, target in table.items():
            groups.setdefault(target, []).append(name)
        for group in groups.values():
            if len(group) > 1:
                kept = next((n for n in group if all(n in t for t in tables.values())), group[0])
                tied |= {n: kept for n in group if n != kept}
    for name, kept in list(tied.items()):
        holders = [table for table in tables.values() if name in table]
        if all(table.get(kept) == table[name] for table in holders):
            for table in holders:
                del table[name]
        else:
            del tied[name]
    return tied


_NOT_A_HEAD = re.compile(r"embed|wte|wpe|shared|position|(^|\.)\d+(\.|$)")


def _find_heads(
    everyone: Mapping[str, Checkpoint], tables: Mapping[str, Mapping[str, str]]
) -> set[str]:
    """Parameters of one output layer that fit no other model, if that is all that does not fit.

    They differ in their number of outputs only, or the base does not have them at all.
    """
    odd: set[str] = set()
    for name in {n for table in tables.values() for n in table}:
        shapes = {
            model: everyone[model].specs[table[name]].shape
            for model, table in tables.items()
            if name in table
        }
        missing = tables.keys() - shapes.keys()
        if missing and missing != {"base"}:
            continue
        outputs_differ = len(set(shapes.values())) > 1
        same_inputs = len({shape[1:] for shape in shapes.values()}) == 1
        if missing or (outputs_differ and same_inputs):
            if max(len(shape) for shape in shapes.values()) > 2:
                return set()
            odd.add(name)
    modules = {name.rpartition(".")[0] for name in odd}
    if len(modules) != 1 or _NOT_A_HEAD.search(next(iter(odd))):
        return set()
    module = modules.pop()
    return {n for table in tables.values() for n in table if n.rpartition(".")[0] == module}


def _differences(
    everyone: Mapping[str, Checkpoint],
    tables: Mapping[str, Mapping[str, str]],
    may_mix_dtypes: bool,
) -> list[str]:
    first, *others = tables
    reference = tables[first]
    problems: list[str] = []
    heads_hint = "name what belongs to one task alone with --heads / heads:"
    dtype_hint = "choose the output's dtype with --dtype / dtype:, such as widest"
    for other in others:
        table = tables[other]
        title, against = _title(other, everyone[other]), _title(first, everyone[first])
        specs = {n: everyone[other].specs[t] for n, t in table.items()}
        wanted = {n: everyone[first].specs[t] for n, t in reference.items()}
        missing = [n for n in wanted if n not in specs]
        extra = [n for n in specs if n not in wanted]
        both = [n for n in wanted if n in specs]
        sizes = [n for n in both if specs[n].shape != wanted[n].shape]
        rows = [
            n
            for n in sizes
            if is_by_token(n, specs[n].shape) and specs[n].shape[1:] == wanted[n].shape[1:]
        ]
        if rows:
            a, b = (max(s[n].shape[0] for n in rows) for s in (specs, wanted))
            problems.append(
                f"{title} has another vocabulary than {against}: embeddings of {a:,} tokens "
                f"instead of {b:,} ({listed(rows)}); bring them together with --tokenizer union / "
                "tokenizer: {source: union}, or source: base to keep the base's"
            )
        shapes = [
            f"{n} {list(specs[n].shape)} instead of {list(wanted[n].shape)}"
            for n in sizes
            if n not in rows
        ]
        kinds = [
            f"{n} {dtype_name(specs[n].dtype)} instead of {dtype_name(wanted[n].dtype)}"
            for n in both
            if specs[n].dtype != wanted[n].dtype
            and not (may_mix_dtypes and all(s[n].dtype.is_floating_point for s in (specs, wanted)))
        ]
        for items, verb, what, advice in (
            (missing, "lacks", f"that {against} has", heads_hint),
            (extra, "has", f"that {against} lacks", heads_hint),
            (shapes, "has", f"of another shape than {against}", heads_hint),
            (kinds, "has", f"of another dtype than {against}", dtype_hint),
        ):
            if items:
                found = f"{title} {verb} {counted(items, 'tensor')} {what}"
                problems.append(f"{found}: {listed(items)} ({advice})")
    return problems


# Parameters with a row for each token: embeddings, and the output layer that is like them.
_BY_TOKEN = re.compile(
    r"embed_tokens|word_embeddings|token_embedding|tok_embeddings|\bwte\b|(^|\.)shared\.weight$|lm_head|"
    r"embed_out|embed_in|cls\.predictions|vocab_|final_logits_bias|(^|\.)embed(dings?)?\.weight$"
)


def is_by_token(name: str, shape: tuple[int, ...]) -> bool:
    """Does a parameter have a row for each token, by its name and the number of its dimensions?"""
    is_of_them = len(shape) == 2 or (len(shape) == 1 and name.endswith("bias"))
    return has_row_per_token(name) and is_of_them


def has_row_per_token(name: str) -> bool:
    """Is it an embedding, or an output layer with a row for each token?"""
    return bool(_BY_TOKEN.search(name.lower()))


def _is_counter(name: str) -> bool:
    """Does a batch norm count its batches in it, which nothing but further training may read?"""
    return name.endswith(_COUNTER)


def _compare_exact(name: str, everyone: Mapping[str, AlignedModel]) -> list[str]:
    """Integer and boolean buffers cannot be averaged, so they must be equal."""
    first, *others = everyone.values()
    spec = first.spec(name)
    if spec.dtype.is_floating_point:
        return []
    for start in range(0, spec.num_elements, _COMPARE_ELEMENTS):
        stop = min(start + _COMPARE_ELEMENTS, spec.num_elements)
        expected = first.read(name, start, stop)
        for other in others:
            if not torch.equal(expected, other.read(name, start, stop)):
                return [
                    f"{_title(other.name, other.checkpoint)}: the {dtype_name(spec.dtype)} buffer "
                    f"'{name}' differs from {_title(first.name, first.checkpoint)}; take one "
                    "model's with an override whose method is passthrough, or list it in heads"
                ]
    return []
