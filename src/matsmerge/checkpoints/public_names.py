"""Names for what is published: a hub id as it is, of a local path only its last part."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from matsmerge.checkpoints.source import local_path
from matsmerge.files.remote_names import is_remote

_SPLIT = re.compile(r"(.+?)( \([^()/]*\))")
# A path of at least two parts, where a sentence could have one: not '</s>', nor a part of a URL.
_PATH = re.compile(r"(?<![^\s'\"(])(?:~|\.{1,2})?/[^\s,;:'\"()/]+/[^\s,;:'\"()]*")


def public_name(source: str) -> str:
    """A hub id as it is; of a path or URL only its last part, for nobody needs the rest.

    Data may have a split behind its name, `rows.jsonl (train)`, which stays.
    """
    if not _is_local(source) and (found := _SPLIT.fullmatch(source)):
        return f"{public_name(found[1])}{found[2]}"
    if "+" in source and not local_path(source).exists():  # a model and an adapter on it
        return "+".join(public_name(part) if part else part for part in source.split("+"))
    if not _is_local(source):
        return source
    name = PurePath(source).name
    return name if name not in ("", "..") else local_path(source).resolve().name


def path_names(paths: Sequence[str]) -> Iterator[list[str]]:
    """Names for paths: by their last parts, by their last two, and so on."""
    parts = [[p for p in re.split(r"[/\\]", path) if p not in ("", ".", "..")] for path in paths]
    for depth in range(1, max([1, *map(len, parts)]) + 1):
        yield [re.sub(r"[^\w.-]+", "-", "-".join(p[-depth:])).strip("-.") for p in parts]


def split_name(argument: str) -> tuple[str | None, str]:
    """Name and source of a model on a command line: `PATH`, or `NAME=PATH`."""
    name, equals, source = argument.partition("=")
    is_named = bool(equals) and not _is_local(argument)
    return (name, source) if is_named else (None, argument)


def without_paths(value: Any, rename: Callable[[str], str] = public_name) -> Any:
    """Plain data, such as a recipe, with public names in place of local paths."""
    if isinstance(value, dict):
        return {key: without_paths(part, rename) for key, part in value.items()}
    if isinstance(value, list):
        return [without_paths(part, rename) for part in value]
    return rename(value) if isinstance(value, str) else value


def public_text(text: str, sources: Iterable[str] = ()) -> str:
    """A sentence with public names in place of local paths; `sources` may be in it."""
    for source in sorted(sources, key=len, reverse=True):
        if _is_local(source) and ("/" in source or "\\" in source):
            text = text.replace(source, public_name(source))
    return _PATH.sub(lambda found: PurePath(found[0]).name or found[0], text)


def _is_local(source: str) -> bool:
    if is_remote(source):
        return not source.startswith("hf://")
    if PurePath(source).is_absolute() or source.startswith(("./", "../", "~")) or source == "..":
        return True
    try:
        return bool(source) and local_path(source).exists()
    except (OSError, ValueError):
        return False
