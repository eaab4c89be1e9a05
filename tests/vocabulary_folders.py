"""Folders of models with small tokenizers, a token for each word; nothing is downloaded."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def tokenizer_json(words: Sequence[str], added: Sequence[str] = ()) -> str:
    """A tokenizer of words, and of others that were added to it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(words) + i, "content": word, **flags, "special": True}
            for i, word in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": words[0],
        },
    }
    return json.dumps(content)


def save_folder(
    folder: Path,
    state: Mapping[str, Tensor],
    words: Sequence[str],
    added: Sequence[str] = (),
    **config: Any,
) -> Path:
    """A model with a tokenizer, and with a configuration if there is anything to say in it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().contiguous() for k, v in state.items()}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(tokenizer_json(words, added))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
