"""What the tokenizers beside models say, read from their files alone, to be compared."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.source import contained
from matsmerge.errors import CheckpointError
from matsmerge.files.guarded_files import parse_as, parse_json, read_bytes, read_text

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL_MAP, _ADDED = "special_tokens_map.json", "added_tokens.json"
_VOCAB_JSON, _VOCAB_TEXT, _MERGES = "vocab.json", "vocab.txt", "merges.txt"
_CLOSED = ("*.model", "*.tiktoken", "*.spm", "tekken.json")  # formats that are compared as a whole
_FILES = (
    TOKENIZER, CONFIG, TEMPLATE, _SPECIAL_MAP, _ADDED, _VOCAB_JSON, _VOCAB_TEXT, _MERGES, *_CLOSED
)  # fmt: skip
_MAX_BYTES = 128 * 2**20
_MAX_VALUES = 5_000_000  # 262,000 tokens and half a million merges of two parts are 1.9 million
_SPECIAL = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
)  # fmt: skip
_CUTTING = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

Digests = Mapping[str, str]  # of files, by name


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer's content, whatever the layout of its files."""

    ids: Mapping[str, int] | None  # of tokens; None where a closed format holds them
    closed: Digests  # files of closed formats, where there are no ids
    parts: Digests  # how text is cut into tokens: what is compared as a whole
    special: Mapping[str, str]  # bos_token and so on
    chat_template: Any  # a text, a list of texts with names, or None


def digest_files(folder: Path | None) -> Digests:
    """The tokenizer's files in a model's folder, each with a digest of its bytes."""
    if folder is None or not folder.is_dir():
        return {}
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    return {
        name: hashlib.sha256(_read(folder, name)).hexdigest()
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in _FILES)
    }


def read_tokenizer(folder: Path, files: Digests) -> Tokenizer:
    """What the files of a folder say; a damaged one is a `CheckpointError`."""
    config = _mapping(folder, CONFIG) if CONFIG in files else {}
    content = _mapping(folder, TOKENIZER) if TOKENIZER in files else {}
    template = _text(folder, TEMPLATE) if TEMPLATE in files else config.get("chat_template")
    ids: dict[str, int] = {}
    parts: dict[str, str] = {}
    if content:
        model = _as(content.get("model", {}), dict[str, Any], folder / TOKENIZER)
        ids |= _vocabulary(model.get("vocab", {}), folder / TOKENIZER)
        parts = _parts(content, model, folder / TOKENIZER)
    elif _VOCAB_JSON in files:
        ids |= _vocabulary(_json(folder, _VOCAB_JSON), folder / _VOCAB_JSON)
        if _MERGES in files:
            lines = _lines(folder, _MERGES)
            parts["merges"] = _digest([x for x in lines if x and not x.startswith("#version")])
    elif _VOCAB_TEXT in files:
        ids |= {token: i for i, token in enumerate(_lines(folder, _VOCAB_TEXT))}
    closed = {n: d for n, d in files.items() if any(fnmatchcase(n, p) for p in _CLOSED)}
    found_ids = ids | _added(folder, files, config, content) if ids else None
    return Tokenizer(
        found_ids,
        closed if found_ids is None else {},
        parts,
        _special(folder, files, config),
        _as(template, str | list[dict[str, Any]] | None, folder / CONFIG),
    )


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
        entries = _as(vocab, list[tuple[str, float]], path)
        return {token: i for i, (token, _) in enumerate(entries)}
    if isinstance(vocab, dict) and any(isinstance(v, dict) for v in vocab.values()):
        return {}  # several vocabularies, as speech models of many languages have
    ids: dict[str, int] = _as(vocab, dict[str, int], path)
    return ids


def _added(
    folder: Path, files: Digests, config: Mapping[str, Any], content: Mapping[str, Any]
) -> dict[str, int]:
    ids: dict[str, int] = {}
    if _ADDED in files:
        ids |= _as(_json(folder, _ADDED), dict[str, int], folder / _ADDED)
    decoder = _as(config.get("added_tokens_decoder") or {}, dict[int, Any], folder / CONFIG)
    ids |= {_content(token): i for i, token in decoder.items()}
    listed = content.get("added_tokens") or []
    for token in _as(listed, list[dict[str, Any]], folder / TOKENIZER):
        ids[_content(token)] = _as(token.get("id"), int, folder / TOKENIZER)
    return ids


def _parts(content: Mapping[str, Any], model: Mapping[str, Any], path: Path) -> dict[str, str]:
    """What decides how text is cut, without what only newer versions write down."""
    merges = _as(model.get("merges") or [], list[str | list[str]], path)
    scores = model.get("vocab") if isinstance(model.get("vocab"), list) else []
    settings = {k: v for k, v in model.items() if k not in ("vocab", "merges")}
    return {
        "merges": _digest([m if isinstance(m, str) else " ".join(m) for m in merges]),
        "model": _digest([settings, scores]),
        **{key: _digest(content.get(key)) for key in _CUTTING},
    }


def _special(folder: Path, files: Digests, config: Mapping[str, Any]) -> dict[str, str]:
    given = _mapping(folder, _SPECIAL_MAP) if _SPECIAL_MAP in files else {}
    found = {**given, **{k: v for k, v in config.items() if v is not None}}
    return {key: _content(found[key]) for key in _SPECIAL if found.get(key)}


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


def _read(folder: Path, name: str) -> bytes:
    return read_bytes(contained(folder, name), CheckpointError, _MAX_BYTES)


def _text(folder: Path, name: str) -> str:
    return read_text(contained(folder, name), CheckpointError, _MAX_BYTES)


def _json(folder: Path, name: str) -> Any:
    path = folder / name
    return parse_json(_text(folder, name), str(path), CheckpointError, most_values=_MAX_VALUES)


def _mapping(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = _as(_json(folder, name), dict[str, Any], folder / name)
    return content


def _as(value: Any, expected: Any, path: Path) -> Any:
    return parse_as(value, expected, str(path), CheckpointError)
