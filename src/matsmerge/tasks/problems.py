"""Saying what is wrong with data: all of it, but not too much at once."""

import difflib
from collections.abc import Iterable, Sequence

MAX_SHOWN = 10


def shorten(problems: Sequence[str]) -> list[str]:
    """The first ten problems and how many more there are."""
    if len(problems) <= MAX_SHOWN:
        return list(problems)
    return [*problems[:MAX_SHOWN], f"and {len(problems) - MAX_SHOWN} more"]


def closest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` if one is close, else what there is."""
    options = list(known)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; there is {', '.join(options[:20])}" if options else ""


def describe(value: object) -> str:
    """A value and its type, short enough for a message."""
    text = repr(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return "null" if value is None else f"{type(value).__name__} {text}"
