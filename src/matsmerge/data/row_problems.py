"""Saying what is wrong with data: all of it, but not too much at once."""

from collections.abc import Sequence

MAX_SHOWN = 10
_ENOUGH = 1000


class Problems:
    """The first ten problems, and how many more there are."""

    def __init__(self) -> None:
        self._shown: list[str] = []
        self._num = 0

    def add(self, *problems: str) -> None:
        self._num += len(problems)
        self._shown += problems[: MAX_SHOWN - len(self._shown)]

    def __bool__(self) -> bool:
        return self._num > 0

    @property
    def are_enough(self) -> bool:
        """Is it no use to look for more?"""
        return self._num >= _ENOUGH

    @property
    def shown(self) -> list[str]:
        more = self._num - len(self._shown)
        if not more:
            return list(self._shown)
        return [*self._shown, f"and {'at least ' if self.are_enough else ''}{more} more"]


def shorten(problems: Sequence[str]) -> list[str]:
    """The first ten problems and how many more there are."""
    found = Problems()
    found.add(*problems)
    return found.shown


def quote(text: str) -> str:
    """A text in quotes, short enough for a message."""
    return f"'{text}'" if len(text) <= 60 else f"'{text[:57]}...' ({len(text):,} characters)"


def describe(value: object) -> str:
    """A value and its type, short enough for a message."""
    text = repr(value[:60] if isinstance(value, (str, bytes, list, tuple)) else value)
    if len(text) > 60:
        text = text[:57] + "..."
    return "null" if value is None else f"{type(value).__name__} {text}"
