"""Files of tokenizers and configurations, brought to another vocabulary."""

import json
from pathlib import Path
from typing import Any

from vocabulary_folders import tokenizer_json

from matsmerge.checkpoints.tokenizer_edits import AddedToken, TokenizerEdits, read_token_ids


def edited(
    folder: Path, edits: TokenizerEdits, files: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    edits.apply(folder)
    return {name: json.loads((folder / name).read_text()) for name in files}


def test_ids_and_sizes_of_configurations(tmp_path: Path) -> None:
    edits = TokenizerEdits(10, 6, (), {0: 4, 1: 5, 2: None, 3: 3}, {"config.json": {}})
    config = {
        "vocab_size": 6,
        "bos_token_id": 0,
        "eos_token_id": [1, 2, 3],
        "pad_token_id": 2,
        "sep_token_id": None,
        "hidden_size": 6,
        "text_config": {"vocab_size": 6, "eos_token_id": 1},
        "vision_config": {"vocab_size": 99},
    }
    found = edited(
        tmp_path, edits, {"config.json": config, "generation_config.json": {"eos_token_id": [2]}}
    )
    assert found["config.json"] == {
        "vocab_size": 10,
        "bos_token_id": 4,
        "eos_token_id": [5, 3],
        "pad_token_id": None,
        "sep_token_id": None,
        "hidden_size": 6,
        "text_config": {"vocab_size": 10, "eos_token_id": 5},
        "vision_config": {"vocab_size": 99},
    }
    assert found["generation_config.json"] == {"eos_token_id": None}


def test_ids_of_the_tokenizers_own_model_come_first(tmp_path: Path) -> None:
    own = {"config.json": {"eos_token_id": 7, "pad_token_id": 12}}
    edits = TokenizerEdits(10, 6, (), {0: 4}, own)
    config = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0}
    found = edited(tmp_path, edits, {"config.json": config})["config.json"]
    # An id beyond the rows means no token.
    assert found == {"eos_token_id": 7, "pad_token_id": None, "bos_token_id": 4}
    assert read_token_ids(tmp_path) == {"config.json": found}
    assert read_token_ids(tmp_path / "none") == {}


def test_added_tokens_are_in_all_files(tmp_path: Path) -> None:
    added = (
        AddedToken.of("ü", 3, {}),
        AddedToken.of("<end>", 4, {"special": True, "lstrip": True}),
    )
    files = {
        "tokenizer.json": json.loads(tokenizer_json(["a", "b"], ["<x>"])),
        "tokenizer_config.json": {"added_tokens_decoder": {"2": {"content": "<x>"}}, "z": 1},
        "added_tokens.json": {"<x>": 2},
    }
    found = edited(tmp_path, TokenizerEdits(5, 3, added, {}), files)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
             "special": False}  # fmt: skip
    end = plain | {"lstrip": True, "normalized": False, "special": True}
    tokens = found["tokenizer.json"]["added_tokens"]
    assert [t["content"] for t in tokens] == ["<x>", "ü", "<end>"]
    assert tokens[1:] == [{"id": 3, "content": "ü", **plain}, {"id": 4, "content": "<end>", **end}]
    assert found["tokenizer_config.json"] == {
        "added_tokens_decoder": {
            "2": {"content": "<x>"},
            "3": {"content": "ü", **plain},
            "4": {"content": "<end>", **end},
        },
        "z": 1,
    }
    assert found["added_tokens.json"] == {"<x>": 2, "ü": 3, "<end>": 4}
    twice = edited(tmp_path, TokenizerEdits(5, 3, added, {}), found)
    assert twice == found
