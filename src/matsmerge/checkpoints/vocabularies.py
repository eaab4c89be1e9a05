"""Comparison of tokenizers: do models mean the same token by the same row of embeddings?

Embeddings are merged row by row. Where models give a token different ids that would mix unrelated
tokens, which is refused; what differs otherwise (tokens that one model lacks, special tokens, chat
templates) is said, and which of them the output has.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from matsmerge.problems import counted, listed, noted

_MAX_SHOWN = 3
_MAX_RENAMED_SHARE, _MIN_RENAMED = 0.05, 16  # unused rows that fine-tuning gave a meaning
_NOT_READ = "put the file right, or do not compare tokenizers with --ignore-tokenizers"
_WHAT_TO_DO = (
    "embeddings are merged row by row; bring vocabularies together with --tokenizer union / "
    "tokenizer: union, or if only the files differ, go on with --ignore-tokenizers / "
    "ignore_tokenizers: true"
)


@dataclass
class TokenizerComparison:
    """Reasons not to merge models with these tokenizers, and notes for those who do."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    chat_template: Any = None  # of the models, for an output whose own files have none


def compare_tokenizers(
    models: Mapping[str, Path | None],
    base: tuple[str, Path | None] | None,
    output: Path | None,
    *,
    ids: bool = True,
    templates: bool = True,
) -> TokenizerComparison:
    """Compare the tokenizers in folders; those without one are not asked.

    `output` is the folder whose files go with the result. Ids are not compared where embeddings
    are brought to one vocabulary anyway, and chat templates where one is chosen.
    """
    found = TokenizerComparison()
    folders = dict(models) | ({base[0]: base[1]} if base else {})
    files: dict[str, Digests] = {}
    for title, folder in folders.items():
        with noted(found.problems, CheckpointError, after=f"; {_NOT_READ}"):
            if digests := digest_files(folder):
                files[title] = digests
    source = next((t for t, folder in folders.items() if folder and folder == output), None)
    if source is not None and source not in files and files:
        found.notes.append(
            f"the output has no tokenizer, since its files are those of {source}, which has none; "
            f"{', '.join(files)} {'has' if len(files) == 1 else 'have'} one"
        )
    if len({tuple(digests.items()) for digests in files.values()}) < 2:
        return found  # all of them have the same files, byte for byte
    read: dict[tuple[Any, ...], Tokenizer] = {}
    tokenizers: dict[str, Tokenizer] = {}
    for title, digests in files.items():
        kind, folder = tuple(digests.items()), folders[title]
        assert folder is not None
        with noted(found.problems, CheckpointError, after=f"; {_NOT_READ}"):
            if kind not in read:
                read[kind] = read_tokenizer(folder, digests)
            tokenizers[title] = read[kind]
    if not tokenizers:
        return found
    reference = source if source in tokenizers else next(iter(tokenizers))
    rows = _compare_rows(tokenizers, reference) if ids else TokenizerComparison()
    found.problems += rows.problems
    if reference == source:  # else the output has none of these
        found.notes += rows.notes
        found.notes += _differences_in_cutting(tokenizers, reference)
        found.notes += _differences_in_special(tokenizers, reference)
        if templates:
            _compare_templates(tokenizers, reference, [t for t in models if t in tokenizers], found)
    return found


def _compare_rows(tokenizers: Mapping[str, Tokenizer], reference: str) -> TokenizerComparison:
    """Compare every vocabulary with the reference's, and what it lacks with that of the others."""
    found = TokenizerComparison()
    output = f"the output has the tokenizer of {reference}"
    known: dict[str, tuple[int, str]] = {}  # token -> id, and who says so
    tokens: dict[int, tuple[str, str]] = {}  # id -> token, and who says so
    compared: list[Tokenizer] = []
    for title in (reference, *(title for title in tokenizers if title != reference)):
        tokenizer, other_ids = tokenizers[title], tokenizers[reference].ids
        if tokenizer.ids is None or any(tokenizer is other for other in compared):
            continue
        compared.append(tokenizer)
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
                f"{title} and {who} give {counted(examples, 'token')} different ids: "
                f"{listed(examples, _MAX_SHOWN)}; {_WHAT_TO_DO}"
            )
        for who, examples in renamed.items():
            most = max(_MIN_RENAMED, round(_MAX_RENAMED_SHARE * len(tokenizer.ids)))
            said = f"{title} and {who} mean different tokens by {counted(examples, 'id')}: "
            said += listed(examples, _MAX_SHOWN)
            if len(examples) > most:
                found.problems.append(f"{said}; {_WHAT_TO_DO}")
            else:
                found.notes.append(f"{said}; {output}")
        if other_ids is None or renamed:
            continue
        for ids, others, one, two in (
            (tokenizer.ids, other_ids, title, reference),
            (other_ids, tokenizer.ids, reference, title),
        ):
            if only := [repr(token) for token in ids if token not in others]:
                said = f"{one} has {counted(only, 'token')} that {two} lacks"
                found.notes.append(f"{said}: {listed(only, _MAX_SHOWN)}; {output}")
    _compare_closed(tokenizers, reference, found)
    return found


def _compare_closed(
    tokenizers: Mapping[str, Tokenizer], reference: str, found: TokenizerComparison
) -> None:
    """Compare what cannot be looked into: equal or not."""
    other = tokenizers[reference]
    for title, tokenizer in tokenizers.items():
        if (tokenizer.ids is None) != (other.ids is None):
            found.notes.append(
                f"the tokenizers of {title} and {reference} are in different formats and were not "
                "compared"
            )
        found.problems += [
            f"{title} and {reference} have a different {name}; {_WHAT_TO_DO}"
            for name in tokenizer.closed.keys() & other.closed.keys()
            if tokenizer.closed[name] != other.closed[name]
        ]


def _differences_in_cutting(tokenizers: Mapping[str, Tokenizer], reference: str) -> Iterator[str]:
    other = tokenizers[reference].parts
    for title, tokenizer in tokenizers.items():
        parts = tokenizer.parts
        different = sorted(key for key in parts.keys() & other.keys() if parts[key] != other[key])
        if different:
            yield (
                f"{title} cuts text into tokens in another way than {reference} "
                f"({', '.join(different)} of tokenizer.json); the output does it as {reference}"
            )


def _differences_in_special(tokenizers: Mapping[str, Tokenizer], reference: str) -> Iterator[str]:
    having = {title: t.special for title, t in tokenizers.items() if t.special}
    for key in sorted({key for special in having.values() for key in special}):
        values = {title: special.get(key) for title, special in having.items()}
        if len(set(values.values())) > 1:
            said = ", ".join(f"{_quoted(value)} in {title}" for title, value in values.items())
            yield (
                f"{key} differs: {said}; the output has that of {reference}, "
                f"{_quoted(tokenizers[reference].special.get(key))}"
            )


def _compare_templates(
    tokenizers: Mapping[str, Tokenizer],
    reference: str,
    models: Sequence[str],
    found: TokenizerComparison,
) -> None:
    by_title = {title: templates_by_name(t.chat_template) for title, t in tokenizers.items()}
    own = by_title[reference]
    others = [title for title in models if by_title[title] and by_title[title] != own]
    if not others:
        return
    if own:
        found.notes.append(
            f"the chat template differs in {', '.join(others)}; the output has that of {reference}"
        )
    elif others == list(models) and all(by_title[t] == by_title[others[0]] for t in others):
        found.chat_template = tokenizers[others[0]].chat_template
        found.notes.append(
            f"{reference} has no chat template; the output has the one that all models share"
        )
    else:
        found.notes.append(
            f"the output has no chat template, as {reference} has none; {', '.join(others)} "
            f"{'has one' if len(others) == 1 else 'have some'}, and not all models the same"
        )


def _quoted(token: str | None) -> str:
    return "none" if token is None else repr(token)
