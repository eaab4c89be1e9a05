"""Problems collected and worded, so that one error says all of them; also those of pydantic.

    problems: list[str] = []
    for source in sources:
        with noted(problems):
            open_checkpoint(source)
    CheckpointError.raise_all(problems)

opens what can be opened, and then says all that is wrong with the others.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ErrorType

from matsmerge.errors import MatsError, closest

MAX_LISTED = 8

_PYDANTICS_OWN = frozenset(get_args(ErrorType))
# Names of the forms of a value that were tried, which pydantic has among the places.
_FORM = re.compile(r"(?:list|dict|tuple|str|int|float|bool|function-\w+)(?:\[.*)?|[A-Z]\w*")


@contextmanager
def noted(
    problems: list[str],
    error_type: type[MatsError] = MatsError,
    *,
    before: str = "",
    after: str = "",
) -> Iterator[None]:
    """Catch an error and add what it says to the problems, with words before and after it."""
    try:
        yield
    except error_type as error:
        found = [f"{before}{problem}{after}" for problem in error.problems]
        problems += [problem for problem in found if problem not in problems]


@contextmanager
def reworded(
    *, before: str = "", after: str = "", error_type: type[MatsError] | None = None
) -> Iterator[None]:
    """Raise an error again with words before and after each problem, or as another type."""
    try:
        yield
    except MatsError as error:
        found = [f"{before}{problem}{after}" for problem in error.problems]
        raise (error_type or type(error))(found) from error


def shortened(problems: Sequence[str], most: int = MAX_LISTED) -> list[str]:
    """The first of many problems, and how many there are besides."""
    more = len(problems) - most
    return [*problems[:most], *([f"and {more:,} more"] if more > 0 else [])]


def listed(items: Sequence[str], most: int = MAX_LISTED) -> str:
    """`a, b and 7 more`, for a sentence."""
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more:,} more" if more > 0 else "")


def counted(items: Sequence[object], what: str) -> str:
    """`1 tensor`, `2,000 tensors`."""
    return f"{len(items):,} {what}{'s' if len(items) != 1 else ''}"


def problems_of(
    error: ValidationError, *models: type[BaseModel], hints: Mapping[str, str] | None = None
) -> list[str]:
    """The problems that pydantic found with a value for one of the models, in sentences.

    An unknown key is compared with those there are; `hints` are what to say instead about some.
    """
    problems = []
    for item in error.errors():
        location = [part for part in item["loc"] if not _FORM.fullmatch(str(part))]
        if item["type"] == "extra_forbidden":
            key = str(location.pop())
            message = _unknown(key, _models_at(location, models), hints or {})
        else:
            message = _message(item)
        where = ".".join(map(str, location))
        problems += [f"{where}: {line}" if where else line for line in message.splitlines()]
    return list(dict.fromkeys(problems))


def _message(item: ErrorDetails) -> str:
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "missing":
        return "is required"
    if item["type"] == "value_error" or item["type"] not in _PYDANTICS_OWN:
        return message
    message = f"{message[0].lower()}{message[1:]}"
    found = repr(item["input"])
    is_long = len(found) > 200 or item["type"] == "too_long"  # it would fill the screen
    return message if is_long else f"{message}, found {found}"


def _models_at(
    location: Sequence[int | str], models: Iterable[type[BaseModel]]
) -> list[type[BaseModel]]:
    """The models that a value at a place may be of."""
    found = list(models)
    for part in location:
        if isinstance(part, int):
            continue
        fields = [model.model_fields[part] for model in found if part in model.model_fields]
        if fields:
            found = [m for field in fields for m in _models_in((field.annotation, *field.metadata))]
        else:  # a key of a mapping, or the name of one of several models
            found = [m for m in found if getattr(m, "name", part) == part]
    return found


def _models_in(annotations: Iterable[Any]) -> Iterator[type[BaseModel]]:
    for one in annotations:
        if isinstance(one, type) and issubclass(one, BaseModel):
            yield one
        else:
            yield from one.classes if hasattr(one, "classes") else _models_in(get_args(one))


def _unknown(key: str, models: Sequence[type[BaseModel]], hints: Mapping[str, str]) -> str:
    for model in models:
        if hasattr(model, "hint"):  # of a method or one of its parts
            return f"unknown parameter '{key}'{hints.get(key) or model.hint(key)}"
    fields = [pair for model in models for pair in model.model_fields.items()]
    known = [field.validation_alias or field.alias or name for name, field in fields]
    return f"unknown key '{key}'{closest(key, known)}"
