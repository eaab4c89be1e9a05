"""Single values of a row, checked."""

from collections.abc import Mapping
from typing import Any

from matsmerge.data.row_problems import describe_value
from matsmerge.errors import DataError
from matsmerge.files.guarded_files import parse_json


def text_of(row: Mapping[str, Any], column: str) -> str:
    """A column's text."""
    value = value_of(row, column)
    if not isinstance(value, str):
        raise DataError(f"'{column}': expected text, found {describe_value(value)}")
    return _checked(value, column)


def _checked(text: str, column: str) -> str:
    """Refuse half of a surrogate pair, which JSON can write and which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"'{column}': is no valid Unicode text ({error})") from error
    return text


def list_of(row: Mapping[str, Any], column: str) -> list[Any]:
    """A column's list; in formats that have none, a list written as JSON."""
    value = value_of(row, column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, f"'{column}': expected a list", DataError)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise DataError(f"'{column}': expected a list, found {describe_value(value)}")
    return list(value)


def texts_of(row: Mapping[str, Any], column: str) -> list[str]:
    """A column's list of texts."""
    values = list_of(row, column)
    for position, value in enumerate(values, 1):
        if not isinstance(value, str):
            raise DataError(
                f"'{column}': expected a list of texts, found {describe_value(value)} "
                f"at position {position}"
            )
        _checked(value, column)
    return values


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """What a row has in a column."""
    if column not in row:
        raise DataError(f"'{column}': there is none in this row")
    return row[column]
