"""Saying what is wrong with data: all of it, but not too much at once."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.errors import DataError

_MAX_SHOWN = 10
ENOUGH = 1000  # so many problems that it is no use to look for more


def refuse(problems: Iterable[str]) -> None:
    """Raise the first ten problems and how many more there are, if there are any."""
    found = list(islice(problems, ENOUGH))
    more = len(found) - _MAX_SHOWN
    if more > 0:
        found[_MAX_SHOWN:] = [f"and {'at least ' if len(found) == ENOUGH else ''}{more} more"]
    DataError.raise_all(found)


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


def describe_value(value: object) -> str:
    """A value and its type, short enough for a message."""
    text = repr(value[:60] if isinstance(value, (str, bytes, list, tuple)) else value)
    if len(text) > 60:
        text = text[:57] + "..."
    return "null" if value is None else f"{type(value).__name__} {text}"
