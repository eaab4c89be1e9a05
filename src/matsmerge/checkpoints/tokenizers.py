"""Tokenizers as their files describe them, read for comparison without loading them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from matsmerge.checkpoints.alignment import matches
from matsmerge.checkpoints.source import contained
from matsmerge.errors import CheckpointError
from matsmerge.files.guarded_files import parse_as, read_bytes, read_json_as, read_text

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL_MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
_VOCAB_JSON, _VOCAB_TEXT, _MERGES = "vocab.json", "vocab.txt", "merges.txt"
_CLOSED = ("*.model", "*.tiktoken", "*.spm", "tekken.json")  # formats that are compared as a whole
_FILES = (
    TOKENIZER, CONFIG, TEMPLATE, _SPECIAL_MAP, ADDED, _VOCAB_JSON, _VOCAB_TEXT, _MERGES, *_CLOSED
)  # fmt: skip
_MAX_BYTES = 128 * 2**20
_MAX_VALUES = 5_000_000  # 262,000 tokens and half a million merges of two parts are 1.9 million
_SPECIAL = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
)  # fmt: skip
_CUTTING = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

T = TypeVar("T")
Digests = Mapping[str, str]  # of files, by name


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer's content, whatever the layout of its files."""

    ids: Mapping[str, int] | None  # of tokens; None where a closed format holds them
    closed: Digests  # files of closed formats, where there are no ids
    parts: Digests  # how text is cut into tokens: what is compared as a whole
    special: Mapping[str, str]  # bos_token and so on
    chat_template: Any  # a text, a list of texts with names, or None
    added: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # beyond the vocabulary


class _AddedToken(BaseModel, extra="allow"):
    id: int
    content: Any = None


class _Model(BaseModel, extra="allow"):
    """How text is cut into tokens; what is not listed are its settings."""

    vocab: Any = {}
    merges: list[str | list[str]] | None = None


class _TokenizerFile(BaseModel, extra="allow"):
    model: _Model = _Model()
    added_tokens: list[_AddedToken] | None = None


class _Settings(BaseModel, extra="allow"):
    added_tokens_decoder: dict[int, Any] | None = None
    chat_template: str | list[dict[str, Any]] | None = None


def is_tokenizer_file(name: str) -> bool:
    """Is a file with this name a part of a tokenizer?"""
    return matches(name, _FILES)


def digest_files(folder: Path | None) -> Digests:
    """The tokenizer's files in a model's folder, each with a digest of its bytes."""
    if folder is None or not folder.is_dir():
        return {}
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    found = {}
    for name in filter(is_tokenizer_file, names):
        content = read_bytes(contained(folder, name), CheckpointError, _MAX_BYTES)
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def read_tokenizer_file(path: Path, expected: type[T]) -> T:
    """A tokenizer's JSON file, which may be large, as a type that pydantic knows."""
    return read_json_as(path, expected, CheckpointError, _MAX_BYTES, _MAX_VALUES)


def read_tokenizer(folder: Path, files: Digests) -> Tokenizer:
    """What the files of a folder say; a damaged one is a `CheckpointError`."""

    def read(name: str, expected: type[T]) -> T | None:
        return read_tokenizer_file(contained(folder, name), expected) if name in files else None

    config = read(CONFIG, _Settings) or _Settings()
    content = read(TOKENIZER, _TokenizerFile) or _TokenizerFile()
    ids: dict[str, int] = {}
    parts: dict[str, str] = {}
    if TOKENIZER in files:
        ids = _vocabulary(content.model.vocab, folder / TOKENIZER)
        parts = _parts(content)
    elif _VOCAB_JSON in files:
        ids = _vocabulary(read(_VOCAB_JSON, object), folder / _VOCAB_JSON)
        if _MERGES in files:
            lines = _lines(folder, _MERGES)
            parts["merges"] = _digest([x for x in lines if x and not x.startswith("#version")])
    elif _VOCAB_TEXT in files:
        ids = {token: i for i, token in enumerate(_lines(folder, _VOCAB_TEXT))}
    added: dict[str, Mapping[str, Any]] = {}
    if ids:
        decoder = config.added_tokens_decoder or {}
        added |= {_content(token): token for token in decoder.values() if isinstance(token, dict)}
        added |= {_content(t.content): t.model_extra or {} for t in content.added_tokens or []}
        ids |= read(ADDED, dict[str, int]) or {}
        ids |= {_content(token): i for i, token in decoder.items()}
        ids |= {_content(token.content): token.id for token in content.added_tokens or []}
    special = read(_SPECIAL_MAP, dict[str, Any]) or {}
    special |= {k: v for k, v in (config.model_extra or {}).items() if v is not None}
    return Tokenizer(
        ids or None,
        {} if ids else {name: files[name] for name in files if matches(name, _CLOSED)},
        parts,
        {key: _content(special[key]) for key in _SPECIAL if special.get(key)},
        _text(folder, TEMPLATE) if TEMPLATE in files else config.chat_template,
        added,
    )


def _text(folder: Path, name: str) -> str:
    return read_text(contained(folder, name), CheckpointError, _MAX_BYTES)


def _lines(folder: Path, name: str) -> list[str]:
    """Lines as transformers sees them: tokens may hold other characters that end lines."""
    lines = _text(folder, name).replace("\r\n", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def templates_by_name(chat_template: Any) -> dict[str, str]:
    """Chat templates by their names; one alone is the default."""
    if isinstance(chat_template, list):
        return {str(t.get("name")): str(t.get("template")) for t in chat_template if t}
    return {"default": str(chat_template)} if chat_template else {}


def _vocabulary(vocab: Any, path: Path) -> dict[str, int]:
    """Ids of tokens: given, or by position, as in a Unigram model's list with scores."""
    if isinstance(vocab, list):
        entries = parse_as(vocab, list[tuple[str, float]], str(path), CheckpointError)
        return {token: i for i, (token, _) in enumerate(entries)}
    if isinstance(vocab, dict) and any(isinstance(v, dict) for v in vocab.values()):
        return {}  # several vocabularies, as speech models of many languages have
    return parse_as(vocab, dict[str, int], str(path), CheckpointError)


def _parts(content: _TokenizerFile) -> dict[str, str]:
    """What decides how text is cut, without what only newer versions write down."""
    model, others = content.model, content.model_extra or {}
    scores = model.vocab if isinstance(model.vocab, list) else []
    return {
        "merges": _digest([m if isinstance(m, str) else " ".join(m) for m in model.merges or []]),
        "model": _digest([model.model_extra, scores]),
        **{key: _digest(others.get(key)) for key in _CUTTING},
    }


def _content(token: Any) -> str:
    """A token's text, which may be alone or within a description of it."""
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def _digest(value: Any) -> str:
    text = json.dumps(_without_defaults(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_defaults(value: Any) -> Any:
    """Without `null` and `false`, which versions differ in writing down."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if v is not None and v is not False}
        return {k: _without_defaults(v) for k, v in kept.items()}
    return [_without_defaults(v) for v in value] if isinstance(value, list) else value
