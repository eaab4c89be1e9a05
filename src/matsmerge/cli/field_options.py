"""Options of a command that are made from the fields of a pydantic model."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

F = TypeVar("F", bound=Callable[..., None])


def takes_options_of(model: type[BaseModel]) -> Callable[[F], F]:
    """Give a command, whose last parameter is `**options`, an option for each field of a model.

    A field says in `json_schema_extra` under which `flag`, if not its name, and in which `panel`.
    A list is given separated by commas, if the field can be None, else by repeating the option;
    a number that can be None is None if it is 0.
    """

    def decorate(command: F) -> F:
        own = list(inspect.signature(command).parameters.values())[:-1]
        made = [_parameter(name, field) for name, field in model.model_fields.items()]
        everything = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *made)]
        # Typer looks at both.
        command.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in everything}
        return command

    return decorate


def values_of(model: type[BaseModel], options: Mapping[str, Any]) -> dict[str, Any]:
    """What the options say, by the names that the model's fields have in files."""
    values = {}
    for name, value in options.items():
        field = model.model_fields[name]
        if value is not None and _is_list(field) and not isinstance(value, list):
            value = [part.strip() for part in value.split(",") if part.strip()]
        elif field.annotation == int | None:
            value = value or None
        elif field.default is True:
            value = not value
        values[field.alias or name] = [] if value is None and field.default_factory else value
    return values


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    extra: Any = field.json_schema_extra
    default, kind = field.default, field.annotation
    settings: dict[str, Any] = {"help": field.description, "rich_help_panel": extra.get("panel")}
    settings["metavar"] = extra.get("metavar")
    flags = [extra.get("flag") or f"--{name.replace('_', '-')}"]
    if kind is bool:
        default = False  # a switch, away from what the field is by default
    elif _is_list(field):
        is_repeated = field.default_factory is not None
        kind, default = (list[str] | None if is_repeated else str | None), None
    elif kind in (int, int | None):
        bounds = {type(limit).__name__: limit for limit in field.metadata}
        lowest = getattr(bounds.get("Ge"), "ge", 0)
        settings["min"] = 0 if kind == int | None and extra.get("zero") else lowest
        settings["max"] = bounds["Le"].le if "Le" in bounds else bounds["Lt"].lt - 1
        if extra.get("zero"):
            default = default or 0
    elif kind not in (float, float | None):
        kind = str | None if default is None else str
    annotation = Annotated[kind, typer.Option(*flags, **settings)]  # type: ignore[valid-type]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _is_list(field: FieldInfo) -> bool:
    return field.annotation == list[str] or list[str] in get_args(field.annotation)
