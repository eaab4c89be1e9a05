"""The files that make weights a model: configuration, tokenizer, processor, chat template."""

import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

from matsmerge.checkpoints.opening import contained

_PATTERNS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
_EXCLUDED = (
    "*.index.json",
    "merge.json",
    "trainer_state.json",
    "*_results.json",
    "requirements*.txt",
    "LICENSE*",
)


def companion_files(folder: Path) -> list[Path]:
    """The companions in a model's folder; a link out of the folder is an error."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    return [
        contained(folder, name)
        for name in names
        if any(fnmatchcase(name, p) for p in _PATTERNS)
        and not any(fnmatchcase(name, p) for p in _EXCLUDED)
    ]


def copy_companions(source: Path, target: Path, dtype: str | None) -> None:
    """Copy them, with the dtype in `config.json` set to what was written."""
    for path in companion_files(source):
        shutil.copyfile(path, target / path.name)
    config_path = target / "config.json"
    if dtype is None or not config_path.exists():
        return
    config = json.loads(config_path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(key) != dtype:
        config[key] = dtype
        config_path.write_text(json.dumps(config, indent=2) + "\n")
