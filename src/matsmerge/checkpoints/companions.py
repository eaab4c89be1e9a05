"""The files that make weights a model: configuration, tokenizer, processor, chat template."""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.alignment import matches
from matsmerge.checkpoints.source import COMPANION_PATTERNS, contained
from matsmerge.checkpoints.tokenizers import CONFIG, TEMPLATE
from matsmerge.errors import CheckpointError
from matsmerge.files.guarded_files import open_regular, read_json_as, read_text

_EXCLUDED = (
    "*.index.json",
    "merge.json",
    "step.json",
    "results.json",
    ".paths.json",
    "trainer_state.json",
    "training.json",
    "tuning.json",
    "*_results.json",
    "requirements*.txt",
    "LICENSE*",
)
# Configurations that may name classes in files beside them, in `auto_map`.
_NAMING_CODE = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_RELATIVE_IMPORT = re.compile(r"^\s*(?:import|from)\s+\.(\w+)", re.MULTILINE)
# Written with the weights, or of no use without them.
_OF_WEIGHTS = ("config.json", "generation_config.json", "adapter_config.json", "*.py")


def companion_files(folder: Path | None) -> tuple[Path, ...]:
    """The companions in a model's folder; a damaged one or a link out of it is an error.

    Python files are among them only where the model's configuration refers to them.
    """
    if folder is None:
        return ()
    names = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.exists()
        and not entry.is_dir()
        and matches(entry.name, COMPANION_PATTERNS)
        and not matches(entry.name, _EXCLUDED)
    )
    found = {name: contained(folder, name) for name in names}
    for path in found.values():
        open_regular(path, CheckpointError).close()
    if "config.json" in found:
        read_object(found["config.json"])
    if any(name.endswith(".py") for name in found):
        code = _code_of(found)
        found = {n: path for n, path in found.items() if not n.endswith(".py") or n in code}
    return tuple(found.values())


def _code_of(found: dict[str, Path]) -> set[str]:
    """The Python files that a model's configuration names, and those that they import."""
    wanted = [
        f"{module}.py"
        for name in _NAMING_CODE
        if name in found
        for module in _modules_in(read_object(found[name]).get("auto_map"))
    ]
    code: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in found and name not in code:
            code.add(name)
            text = read_text(found[name], CheckpointError)
            wanted += [f"{module}.py" for module in _RELATIVE_IMPORT.findall(text)]
    return code


def _modules_in(auto_map: Any) -> Iterator[str]:
    """The modules of `{"AutoModel": "modeling_x.XModel"}`; tokenizers have lists of two."""
    for named in auto_map.values() if isinstance(auto_map, dict) else ():
        for reference in named if isinstance(named, list) else [named]:
            # `owner/name--modeling_x.XModel` is in another repository.
            if isinstance(reference, str) and "--" not in reference:
                yield reference.partition(".")[0]


def code_notes(companions: Sequence[Path], model: str) -> list[str]:
    """What to say where companions of a model hold code."""
    code = [path.name for path in companions if path.suffix == ".py"]
    if not code:
        return []
    return [
        f"code of {model} is carried along, since its configuration refers to it (auto_map): "
        f"{', '.join(code)}; it runs only where the result is loaded with trust_remote_code=True, "
        "so read it before"
    ]


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    return read_json_as(path, dict[str, Any], CheckpointError)


def copy_companions(
    companions: Iterable[Path],
    target: Path,
    dtype: str | None,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Copy them, with the dtype in `config.json` set to what was written, and other changes."""
    for path in companions:
        shutil.copyfile(path, target / path.name)
    config_path = target / "config.json"
    if not config_path.exists():
        return
    config = read_object(config_path)
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    changed = _changed(kept, {**({key: dtype} if dtype else {}), **(changes or {})})
    if changed != config:
        config_path.write_text(json.dumps(changed, indent=2) + "\n")


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with changes, also in its parts."""
    parts = {
        k: _changed(config.get(k, {}), v) for k, v in changes.items() if isinstance(v, Mapping)
    }
    return {**config, **changes, **parts}


def copy_processor(folders: Sequence[Path], target: Path) -> None:
    """Copy tokenizer and image processor, each file from the first folder that has it."""
    for folder in folders:
        for path in companion_files(folder):
            if not matches(path.name, _OF_WEIGHTS) and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)


def add_chat_template(template: Any, folder: Path) -> None:
    """Put a chat template where transformers looks for it, in place of another."""
    path, own_file = folder / CONFIG, folder / TEMPLATE
    if isinstance(template, str) and (own_file.exists() or not path.exists()):
        own_file.write_text(template, encoding="utf-8")
        return
    config = read_object(path) if path.exists() else {}
    path.write_text(json.dumps({**config, "chat_template": template}, indent=2) + "\n")
