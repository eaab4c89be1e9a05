"""Saying what is wrong with data: all of it, but not too much at once."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.errors import DataError

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

    @property
    def are_enough(self) -> bool:
        """Is it no use to look for more?"""
        return self._num >= _ENOUGH

    def refuse(self) -> None:
        """Raise an error if there are any."""
        more = self._num - len(self._shown)
        if more:
            self._shown.append(f"and {'at least ' if self.are_enough else ''}{more} more")
        if self._shown:
            raise DataError(self._shown)


def refuse(problems: Iterable[str]) -> None:
    """Raise the first ten problems and how many more there are, if there are any."""
    found = Problems()
    for problem in problems:
        found.add(problem)
    found.refuse()


@contextmanager
def library_errors(problem: str, advice: str = "") -> Iterator[None]:
    """Turn whatever a library raises into an error that says this and what the library said."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # each library and each format has its own ways to fail
        raise DataError(f"{problem} ({first_line(error)}){advice}") from error


def quote(text: str) -> str:
    """A text in quotes, short enough for a message."""
    return f"'{text}'" if len(text) <= 60 else f"'{text[:57]}...' ({len(text):,} characters)"


def describe(value: object) -> str:
    """A value and its type, short enough for a message."""
    text = repr(value[:60] if isinstance(value, (str, bytes, list, tuple)) else value)
    if len(text) > 60:
        text = text[:57] + "..."
    return "null" if value is None else f"{type(value).__name__} {text}"
