"""Pydantic's errors as sentences: where, what is wrong, what was found, what was meant."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ErrorType

from matsmerge.errors import closest

_PYDANTICS_OWN = frozenset(get_args(ErrorType))
# Names of the forms of a value that were tried, which pydantic has among the places.
_FORM = re.compile(r"(?:list|dict|tuple|str|int|float|bool|function-\w+)(?:\[.*)?|[A-Z]\w*")


def problems_of(
    error: ValidationError, *models: type[BaseModel], hints: Mapping[str, str] | None = None
) -> list[str]:
    """All that is wrong with a value that was to become one of the models.

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
    """What a value at a place may become."""
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
