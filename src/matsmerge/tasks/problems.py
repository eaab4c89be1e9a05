"""Saying what is wrong with data: all of it, but not too much at once."""

from collections.abc import Sequence

MAX_SHOWN = 10


def shorten(problems: Sequence[str]) -> list[str]:
    """The first ten problems and how many more there are."""
    if len(problems) <= MAX_SHOWN:
        return list(problems)
    return [*problems[:MAX_SHOWN], f"and {len(problems) - MAX_SHOWN} more"]


def describe(value: object) -> str:
    """A value and its type, short enough for a message."""
    text = repr(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return "null" if value is None else f"{type(value).__name__} {text}"
