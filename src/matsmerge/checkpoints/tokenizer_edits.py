"""Files of a model made to agree with another vocabulary: tokenizer, configuration, generation."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.companions import read_object
from matsmerge.checkpoints.tokenizers import ADDED, CONFIG, TOKENIZER, read_tokenizer_file

_MODEL, _GENERATION = "config.json", "generation_config.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class AddedToken:
    """A token that a tokenizer gets; `flags` say how it is found in text."""

    content: str
    id: int
    flags: Mapping[str, bool]

    @classmethod
    def of(cls, content: str, id_: int, described: Mapping[str, Any]) -> "AddedToken":
        """As a model's files describe it; a token of the vocabulary proper has no description."""
        defaults = {"normalized": not described.get("special")}
        return cls(content, id_, {k: bool(described.get(k, defaults.get(k))) for k in _FLAGS})


@dataclass(frozen=True)
class TokenizerEdits:
    """What is different in the files of a merged model.

    `new_ids` says which id a token gets that the configuration has by its old one, if any.
    `preferred` are ids that the tokenizer's own model has in these files.
    """

    num_rows: int
    old_num_rows: int
    added: tuple[AddedToken, ...]
    new_ids: Mapping[int, int | None]
    preferred: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def apply(self, folder: Path) -> None:
        """Change the files of a folder."""
        if self.added:
            self._add_tokens(folder)
        for name in (_MODEL, _GENERATION):
            path = folder / name
            if path.is_file():
                content = self._with_ids(read_object(path), self.preferred.get(name, {}))
                if name == _MODEL:
                    content = self._with_size(content)
                path.write_text(json.dumps(content, indent=2) + "\n")

    def _add_tokens(self, folder: Path) -> None:
        path = folder / TOKENIZER
        content = read_tokenizer_file(path, dict[str, Any])
        entries = {t["content"]: t for t in content.get("added_tokens") or []}
        for token in self.added:
            entries.setdefault(
                token.content, {"id": token.id, "content": token.content, **token.flags}
            )
        content["added_tokens"] = sorted(entries.values(), key=lambda entry: int(entry["id"]))
        path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
        path = folder / CONFIG
        config = read_object(path) if path.is_file() else {}
        if isinstance(decoder := config.get("added_tokens_decoder"), dict):
            for token in self.added:
                decoder.setdefault(str(token.id), {"content": token.content, **token.flags})
            path.write_text(json.dumps(config, indent=2) + "\n")
        path = folder / ADDED
        if path.is_file():
            ids = read_object(path) | {token.content: token.id for token in self.added}
            path.write_text(json.dumps(ids, indent=2) + "\n")

    def _with_ids(self, content: Any, preferred: Mapping[str, Any]) -> Any:
        """Every `…_token_id` as it is in the output; None for a token that it lacks."""
        if not isinstance(content, dict):
            return content
        found = {}
        for key, value in content.items():
            if key.endswith("_token_id"):
                is_new = key in preferred
                found[key] = self._new_id(preferred[key] if is_new else value, is_new)
            else:
                found[key] = self._with_ids(value, {})
        return found

    def _new_id(self, value: Any, is_new: bool) -> Any:
        if isinstance(value, list):
            return [new for one in value if (new := self._new_id(one, is_new)) is not None] or None
        if type(value) is not int:
            return value
        new = value if is_new else self.new_ids.get(value)
        return new if new is not None and new < self.num_rows else None

    def _with_size(self, config: dict[str, Any]) -> dict[str, Any]:
        """The number of rows, wherever a configuration says it."""
        found = dict(config)
        for key, value in config.items():
            if isinstance(value, dict):
                found[key] = self._with_size(value)
            elif key == "vocab_size" and value == self.old_num_rows:
                found[key] = self.num_rows
        return found


def read_token_ids(folder: Path) -> dict[str, dict[str, Any]]:
    """The ids of special tokens in a model's configuration and generation files."""
    return {
        name: {k: v for k, v in read_object(folder / name).items() if k.endswith("_token_id")}
        for name in (_MODEL, _GENERATION)
        if (folder / name).is_file()
    }
