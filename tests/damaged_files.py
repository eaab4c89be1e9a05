"""Files as they are after damage: values of other types at every place, bytes that are gone."""

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from matsmerge.errors import MatsError

_WRONG: tuple[Any, ...] = (
    None, True, -1, 0, 3.5, 10**400, math.nan, math.inf, "", "text", "line\nbreak <b>|`",
    [], [1], [[]], ["text"], [None], {}, {"a": 1}, {"a": {"b": []}},
)  # fmt: skip
_GONE = object()
_MAX_ITEMS = 2  # of a list or mapping, of which the others are alike


def mutants(content: Any, every: int = 1) -> Iterator[tuple[str, Any]]:
    """The content with one value replaced or left out, and where; or only some of them."""
    number = 0
    for place in _places(content):
        where = ".".join(map(str, place)) or "everything"
        for wrong in (*_WRONG, _GONE):
            number += 1
            if number % every == 0 and (place or wrong is not _GONE):
                shown = "10**400" if wrong == 10**400 else repr(wrong)
                yield f"{where} = {shown}", _with(content, place, wrong)


def damaged_texts(text: str) -> Iterator[tuple[str, bytes]]:
    """A file's bytes, damaged so that they may not be JSON any more."""
    content = text.encode()
    yield "empty", b""
    yield "spaces", b" \n"
    yield "zeros", bytes(len(content))
    yield "not UTF-8", b"\xff" + content
    yield "not UTF-8 inside", content.replace(b'"', b'"\xff', 1)
    yield "UTF-16", text.encode("utf-16")
    yield "deep list", b"[" * 100_000
    yield "deep mapping", b'{"a":' * 100_000
    yield "many digits", b"9" * 10_000
    yield "half a character", rb'{"\ud800": "\ud800"}'
    for part in (1, 2, 3, 5, 8):
        yield f"cut off after {part} of 9", content[: part * len(content) // 9]
    yield "last byte gone", content.rstrip()[:-1]
    yield "twice", content + content


def mutated_texts(content: Any, every: int = 1) -> Iterator[tuple[str, bytes]]:
    """All of these of a JSON file with this content."""
    yield from damaged_texts(json.dumps(content))
    for what, mutant in mutants(content, every):
        yield what, json.dumps(mutant).encode()


def refused(
    path: Path,
    texts: Iterable[tuple[str, bytes]],
    use: Callable[[], object],
    *,
    names_file: bool = True,
) -> list[str]:
    """Those of a file's contents that are refused; all others can be used.

    An error is one for the user, names the file and is short; anything else is our mistake.
    """
    found = []
    for what, content in texts:
        path.write_bytes(content)
        problem = ""
        try:
            use()
        except MatsError as error:
            problem = str(error)
        except Exception as error:
            raise AssertionError(what) from error
        if problem:
            found.append(what)
            assert not names_file or path.name in problem, f"{what}: {problem}"
            assert len(problem) < 5000, what
    return found


def _places(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    if isinstance(content, dict):
        for number, (key, value) in enumerate(content.items()):
            if number < _MAX_ITEMS or not _are_alike(content):
                yield from _places(value, (*place, key))
    elif isinstance(content, list):
        for number, value in enumerate(content[:_MAX_ITEMS]):
            yield from _places(value, (*place, number))


def _are_alike(content: dict[str, Any]) -> bool:
    """Is it one thing by many names?"""
    return (
        len(content) > 2
        and len({_shape(v) for v in content.values()}) == 1
        and any(isinstance(v, dict) for v in content.values())
    )


def _shape(value: Any) -> str:
    return "dict" if isinstance(value, dict) else type(value).__name__


def _with(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    result = copy.deepcopy(content)
    inner = result
    for key in place[:-1]:
        inner = inner[key]
    if value is _GONE:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return result
