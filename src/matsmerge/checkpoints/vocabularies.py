"""Do models mean the same token by the same row of their embeddings?

Embeddings are merged row by row. Where models give a token different ids that would mix unrelated
tokens, which is refused; what differs otherwise (tokens that one model lacks, special tokens, chat
templates) is said, and which of them the output has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.tokenizers import (
    Digests,
    Tokenizer,
    digest_files,
    read_tokenizer,
    templates_by_name,
)
from matsmerge.errors import CheckpointError

_MAX_SHOWN = 3
_MAX_RENAMED_SHARE, _MIN_RENAMED = 0.05, 16  # unused rows that fine-tuning gave a meaning
_NOT_READ = "put the file right, or do not compare tokenizers with --ignore-tokenizers"
_WHAT_TO_DO = (
    "embeddings are merged row by row, and this version cannot bring vocabularies together; merge "
    "models with one tokenizer, or if only the files differ, go on with --ignore-tokenizers / "
    "ignore_tokenizers: true"
)


@dataclass
class Comparison:
    """What is wrong with merging models with these tokenizers, and what should be known."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    chat_template: Any = None  # of the models, for an output whose own files have none


def compare_tokenizers(
    models: Mapping[str, Path | None], base: tuple[str, Path | None] | None, output: Path | None
) -> Comparison:
    """Compare the tokenizers in folders; those without one are not asked.

    `output` is the folder whose files go with the result.
    """
    found = Comparison()
    folders = dict(models) | ({base[0]: base[1]} if base else {})
    files: dict[str, Digests] = {}
    for title, folder in folders.items():
        try:
            files[title] = digest_files(folder)
        except CheckpointError as error:
            found.problems += [f"{problem}; {_NOT_READ}" for problem in error.problems]
            files[title] = {}
    having = [title for title in files if files[title]]
    source = next((t for t, folder in folders.items() if folder and folder == output), None)
    if source is not None and source not in having and having:
        found.notes.append(
            f"the output has no tokenizer, since its files are those of {source}, which has none; "
            f"{_names(having)} {'has' if len(having) == 1 else 'have'} one"
        )
    num_notes = len(found.notes)
    kinds = {tuple(sorted(files[title].items())) for title in having}
    if len(kinds) < 2:  # all of them have the same files, byte for byte
        return found
    read: dict[tuple[Any, ...], Tokenizer] = {}
    tokenizers: dict[str, Tokenizer] = {}
    for title in having:
        folder, kind = folders[title], tuple(sorted(files[title].items()))
        assert folder is not None
        try:
            if kind not in read:
                read[kind] = read_tokenizer(folder, files[title])
            tokenizers[title] = read[kind]
        except CheckpointError as error:
            found.problems += [f"{problem}; {_NOT_READ}" for problem in error.problems]
    if not tokenizers:
        return found
    reference = source if source in tokenizers else next(iter(tokenizers))
    _compare_vocabularies(tokenizers, reference, found)
    if reference != source:  # the output has none of these
        return Comparison(found.problems, found.notes[:num_notes])
    for title, tokenizer in tokenizers.items():
        if tokenizer is not tokenizers[reference]:
            _compare_cutting(title, tokenizer, reference, tokenizers[reference], found)
    _compare_special(tokenizers, reference, found)
    _compare_templates(tokenizers, reference, [t for t in models if t in tokenizers], found)
    return found


def _compare_vocabularies(
    tokenizers: Mapping[str, Tokenizer], reference: str, found: Comparison
) -> None:
    """Compare every vocabulary with the reference's, and what it lacks with that of the others."""
    order = [reference, *(title for title in tokenizers if title != reference)]
    known: dict[str, tuple[int, str]] = {}  # token -> id, and who says so
    tokens: dict[int, tuple[str, str]] = {}  # id -> token, and who says so
    compared: list[Tokenizer] = []
    for title in order:
        tokenizer = tokenizers[title]
        if tokenizer.ids is None or any(tokenizer is other for other in compared):
            continue
        moved: dict[str, list[str]] = {}
        renamed: dict[str, list[str]] = {}
        for token, i in tokenizer.ids.items():
            before, who = known.setdefault(token, (i, title))
            if before != i:
                moved.setdefault(who, []).append(f"{token!r} is {i} and {before}")
            other, who = tokens.setdefault(i, (token, title))
            if other != token and other not in tokenizer.ids:
                renamed.setdefault(who, []).append(f"{i} is {token!r} and {other!r}")
        for who, examples in moved.items():
            found.problems.append(
                f"{title} and {who} give {_count(examples, 'token')} different ids: "
                f"{_listing(examples)}; {_WHAT_TO_DO}"
            )
        for who, examples in renamed.items():
            most = max(_MIN_RENAMED, round(_MAX_RENAMED_SHARE * len(tokenizer.ids)))
            said = f"{title} and {who} mean different tokens by {_count(examples, 'id')}: "
            said += _listing(examples)
            if len(examples) > most:
                found.problems.append(f"{said}; {_WHAT_TO_DO}")
            else:
                found.notes.append(f"{said}; the output has the tokenizer of {reference}")
        _note_lacking(title, tokenizer, reference, tokenizers[reference], renamed, found)
        compared.append(tokenizer)
    _compare_closed(tokenizers, reference, found)


def _note_lacking(
    title: str,
    tokenizer: Tokenizer,
    reference: str,
    other: Tokenizer,
    renamed: Mapping[str, Sequence[str]],
    found: Comparison,
) -> None:
    if tokenizer.ids is None or other.ids is None or renamed:
        return
    for a, b, one, two in (
        (tokenizer.ids, other.ids, title, reference),
        (other.ids, tokenizer.ids, reference, title),
    ):
        only = [repr(token) for token in a if token not in b]
        if only:
            found.notes.append(
                f"{one} has {_count(only, 'token')} that {two} lacks: {_listing(only)}; the output "
                f"has the tokenizer of {reference}"
            )


def _compare_closed(tokenizers: Mapping[str, Tokenizer], reference: str, found: Comparison) -> None:
    """Compare what cannot be looked into: equal or not."""
    other = tokenizers[reference]
    for title, tokenizer in tokenizers.items():
        if (tokenizer.ids is None) != (other.ids is None):
            found.notes.append(
                f"the tokenizers of {title} and {reference} are in different formats and were not "
                "compared"
            )
        elif tokenizer.ids is None:
            for name in tokenizer.closed.keys() & other.closed.keys():
                if tokenizer.closed[name] != other.closed[name]:
                    found.problems.append(
                        f"{title} and {reference} have a different {name}; {_WHAT_TO_DO}"
                    )


def _compare_cutting(
    title: str, tokenizer: Tokenizer, reference: str, other: Tokenizer, found: Comparison
) -> None:
    both = tokenizer.parts.keys() & other.parts.keys()
    different = sorted(key for key in both if tokenizer.parts[key] != other.parts[key])
    if different:
        found.notes.append(
            f"{title} cuts text into tokens in another way than {reference} "
            f"({', '.join(different)} of tokenizer.json); the output does it as {reference}"
        )


def _compare_special(
    tokenizers: Mapping[str, Tokenizer], reference: str, found: Comparison
) -> None:
    having = {title: t.special for title, t in tokenizers.items() if t.special}
    for key in sorted({key for special in having.values() for key in special}):
        values = {title: special.get(key) for title, special in having.items()}
        if len(set(values.values())) > 1:
            said = ", ".join(f"{_quoted(value)} in {title}" for title, value in values.items())
            found.notes.append(
                f"{key} differs: {said}; the output has that of {reference}, "
                f"{_quoted(tokenizers[reference].special.get(key))}"
            )


def _compare_templates(
    tokenizers: Mapping[str, Tokenizer], reference: str, models: Sequence[str], found: Comparison
) -> None:
    by_title = {title: templates_by_name(t.chat_template) for title, t in tokenizers.items()}
    own = by_title[reference]
    others = [title for title in models if by_title[title] and by_title[title] != own]
    if not others:
        return
    if own:
        found.notes.append(
            f"the chat template differs in {_names(others)}; the output has that of {reference}"
        )
    elif others == list(models) and all(by_title[t] == by_title[others[0]] for t in others):
        found.chat_template = tokenizers[others[0]].chat_template
        found.notes.append(
            f"{reference} has no chat template; the output has the one that all models share"
        )
    else:
        found.notes.append(
            f"the output has no chat template, as {reference} has none; {_names(others)} "
            f"{'has one' if len(others) == 1 else 'have some'}, and not all models the same"
        )


def _quoted(token: str | None) -> str:
    return "none" if token is None else repr(token)


def _names(titles: Sequence[str]) -> str:
    return ", ".join(titles)


def _count(items: Sequence[str], what: str) -> str:
    return f"{len(items):,} {what}{'s' if len(items) != 1 else ''}"


def _listing(items: Sequence[str]) -> str:
    more = f" and {len(items) - _MAX_SHOWN:,} more" if len(items) > _MAX_SHOWN else ""
    return ", ".join(items[:_MAX_SHOWN]) + more
