"""Options of commands, made from the fields of pydantic models.

A parameter of a command that is such a model stands for an option for each of its fields.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from matsmerge.errors import RecipeError
from matsmerge.files.guarded_files import local_path
from matsmerge.problems import problems_of

RUNNING = "Running"  # the panel of options that change how, not what
_LIMITS = ("ge", "le", "lt")
_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


class CommandOptions(BaseModel):
    """Options that a command's help shows in one panel; a field's docstring is its help."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    panel: ClassVar[str | None] = None


def option(default: Any = None, **settings: Any) -> Any:
    """A field of which the command line is to know more than name, type and docstring.

    `flag` is its name there, if another, `short` one of a letter, `metavar` what its value is
    called, `panel` where it is shown, if not with the others, `values` those that a shell
    completes. With `zero`, 0 stands for None.
    Other settings are pydantic's, such as limits.
    """
    names = ("flag", "short", "metavar", "panel", "values", "zero", "is_argument")
    shown = {name: settings.pop(name) for name in names if name in settings}
    return Field(default, json_schema_extra=shown, **settings)


def argument(default: Any = ..., **settings: Any) -> Any:
    """A field that is given by its place on the command line, without a flag."""
    return option(default, is_argument=True, **settings)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of its parameters that are pydantic models.

    A list is given by repeating the option, one that can be None separated by commas. A bool is a
    switch away from what the field is by default.
    """
    own = inspect.signature(command).parameters.values()
    models = {p.name: p.annotation for p in own if _is_model(p.annotation)}
    everything: list[inspect.Parameter] = []
    for p in own:
        made = _parameters(models[p.name]) if p.name in models else [p]
        everything += [m.replace(kind=inspect.Parameter.KEYWORD_ONLY) for m in made]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, model in models.items():
            given[name] = _make(model, {key: given.pop(key) for key in model.model_fields})
        command(**given)

    # Typer looks at both.
    run.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in everything}
    return run


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _make(model: type[BaseModel], given: dict[str, Any]) -> BaseModel:
    fields = model.model_fields
    values = {fields[key].alias or key: _value(fields[key], given[key]) for key in given}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise RecipeError(problems_of(error, model)) from error


def _value(field: FieldInfo, given: Any) -> Any:
    """What a field gets for what an option was given."""
    if given is None:
        return [] if get_origin(field.annotation) is list else None
    if isinstance(given, str) and list[str] in get_args(field.annotation):
        return [part.strip() for part in given.split(",") if part.strip()]
    if _shown(field).get("zero"):
        return given or None
    if isinstance(given, list):
        return [_local(one) for one in given]
    return not given if field.default is True else _local(given)


def _local(given: Any) -> Any:
    """A path with `~` replaced; anything else as it is."""
    if not isinstance(given, Path):
        return given
    return local_path(given)


def _parameters(model: type[BaseModel]) -> list[inspect.Parameter]:
    panel = getattr(model, "panel", None)
    return [_parameter(name, field, panel) for name, field in model.model_fields.items()]


def _parameter(name: str, field: FieldInfo, panel: str | None) -> inspect.Parameter:
    shown, types = _shown(field), get_args(field.annotation)
    kind: Any = field.annotation
    default = inspect.Parameter.empty if field.is_required() else field.default
    flag = shown.get("flag") or flag_of(name)
    details: dict[str, Any] = {
        "help": " ".join((field.description or "").split()),
        "metavar": shown.get("metavar") or _metavar(name, field),
        "rich_help_panel": shown.get("panel", panel),
        "autocompletion": _completion(field),
    }
    if kind is bool:
        default = False
    elif bool in types:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    elif int in (kind, *types):
        limits = {n: getattr(m, n) for m in field.metadata for n in _LIMITS if hasattr(m, n)}
        details["min"] = 0 if shown.get("zero") else limits["ge"]
        details["max"] = limits["le"] if "le" in limits else limits["lt"] - 1
        default = 0 if shown.get("zero") and default is None else default
    elif get_origin(kind) is list and not field.is_required():
        kind, default = kind | None, None
    elif list[str] in types or any(get_origin(t) is Literal for t in (kind, *types)):
        kind = str | None if default is None else str
    flags = [flag, shown["short"]] if "short" in shown else [flag]
    is_argument = shown.get("is_argument")
    made = typer.Argument(**details) if is_argument else typer.Option(*flags, **details)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, made]
    )


def _completion(field: FieldInfo) -> Callable[[str], list[str]] | None:
    """What a shell asks for the values that begin with what was typed; None if any may be."""
    kinds = [field.annotation, *get_args(field.annotation)]
    literals = [str(v) for kind in kinds if get_origin(kind) is Literal for v in get_args(kind)]
    values = _shown(field).get("values") or literals
    if not values:
        return None
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def _metavar(name: str, field: FieldInfo) -> str:
    """What a value is called that has no name of its own: by its type."""
    if _shown(field).get("is_argument"):
        return name.upper()
    types = [field.annotation, *get_args(field.annotation)]
    for kind in types:
        if get_origin(kind) is Literal:
            return "|".join(map(str, get_args(kind)))
    return next((_METAVARS[kind] for kind in types if kind in _METAVARS), "TEXT")


def flag_of(name: str) -> str:
    """`--off-diagonal` of `off_diagonal`."""
    return f"--{name.replace('_', '-')}"


def _shown(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
