"""JSON in a safetensors file's metadata, with something wrong put into it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

MISSING = object()  # takes a key away


def edit_metadata(path: Path, key: str, change: Callable[[Any], Any]) -> None:
    """Replace a file's JSON by what `change` makes of it."""
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    content = json.dumps(change(json.loads(metadata[key])))
    save_file(load_file(path), path, metadata=metadata | {key: content})


def put(content: Any, where: str, value: object) -> Any:
    """The content with a value at a path of keys and positions, `a.0.b`; all of it at ``."""
    if not where:
        return value
    *path, last = where.split(".")
    inner = content
    for key in path:
        inner = inner[int(key)] if isinstance(inner, list) else inner[key]
    if value is MISSING:
        del inner[last]
    elif isinstance(inner, list):
        inner[int(last)] = value
    else:
        inner[last] = value
    return content
