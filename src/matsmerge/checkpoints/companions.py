"""The files that make weights a model: configuration, tokenizer, processor, chat template."""

import json
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.hub import COMPANION_PATTERNS
from matsmerge.checkpoints.opening import contained
from matsmerge.errors import CheckpointError

_EXCLUDED = (
    "*.index.json",
    "merge.json",
    "trainer_state.json",
    "training.json",
    "tuning.json",
    "*_results.json",
    "requirements*.txt",
    "LICENSE*",
)


def companion_files(folder: Path | None) -> tuple[Path, ...]:
    """The companions in a model's folder; a damaged one or a link out of it is an error."""
    if folder is None:
        return ()
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    found = tuple(
        contained(folder, name)
        for name in names
        if any(fnmatchcase(name, p) for p in COMPANION_PATTERNS)
        and not any(fnmatchcase(name, p) for p in _EXCLUDED)
    )
    for path in found:
        if path.name == "config.json":
            read_json(path)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def copy_companions(companions: Iterable[Path], target: Path, dtype: str | None) -> None:
    """Copy them, with the dtype in `config.json` set to what was written."""
    for path in companions:
        shutil.copyfile(path, target / path.name)
    config_path = target / "config.json"
    if dtype is None or not config_path.exists():
        return
    config = read_json(config_path)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(key) != dtype:
        config[key] = dtype
        config_path.write_text(json.dumps(config, indent=2) + "\n")
