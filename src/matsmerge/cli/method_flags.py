"""Flags of `mats merge` for methods, and for the options of methods, objectives and solvers.

They are made from the fields of the classes, and only when the command is asked for: the classes
take a second to import. `--scale 0.3` is the same as `--set scale=0.3`.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import typer
from pydantic import create_model
from typer.core import TyperCommand

from matsmerge.cli.field_options import flag_of, option, takes_options
from matsmerge.cli.merge_options import Solving, WithoutFile
from matsmerge.errors import RecipeError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_METAVARS = {float: "NUMBER", int: "INTEGER", str: "TEXT"}


class MergeCommand(TyperCommand):
    """A command that has flags for methods and their options, before its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        own = super().get_params(ctx)
        taken = {param.name for param in own}  # those are left to --set
        return [*(param for param in made_params() if param.name not in taken), *own]

    def invoke(self, ctx: Any) -> Any:
        """Hand the flags' values to the command as the object of its context."""
        own = {param.name for param in self.params}
        ctx.obj = {p.name: ctx.params.pop(p.name) for p in made_params() if p.name not in own}
        return super().invoke(ctx)


def parse_method(flags: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A method as plain data, from its flags and from what was given as `--set scale=0.3`."""
    from matsmerge.files.strict_yaml import parse_yaml
    from matsmerge.recipes.method_spec import set_parameter

    method = {
        key: parse_yaml(value, flag_of(key), RecipeError) if isinstance(value, str) else value
        for key, value in flags.items()
        if value is not None
    }
    if "method" in method:
        method["name"] = method.pop("method")
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise RecipeError(f"--set: expected NAME=VALUE, as in scale=0.3, found '{text}'")
        set_parameter(method, key, parse_yaml(value, f"--set {key}", RecipeError))
    return method


@cache
def made_params() -> list[Any]:
    """The flags as typer makes them for a function that has them as its parameters."""

    def holder(flags: Any) -> None: ...

    holder.__annotations__["flags"] = create_model("MethodFlags", **dict(_flags()))
    app = typer.Typer(add_completion=False)
    app.command()(takes_options(holder))
    command: Any = typer.main.get_command(app)
    return list(command.params)


def _flags() -> Iterator[tuple[str, Any]]:
    """Every flag: its name, and its type with what typer is to know of it."""
    from matsmerge.methods.parts import Parts, tables

    methods, objectives, solvers = tables().values()
    yield "method", _made(None, f"How to merge: {', '.join(methods)}.", WithoutFile.panel)
    solving = {name: cls for name, cls in methods.items() if issubclass(cls, Parts)}
    others = {name: cls for name, cls in methods.items() if name not in solving}
    fields: dict[str, tuple[str, FieldInfo, list[str]]] = {}
    for panel, table in (
        ("Options of methods, also as the init of mats", others),
        (Solving.panel, solving),
        ("Options of objectives", objectives),
        ("Options of solvers", solvers),
    ):
        for owner, cls in table.items():
            for name, field in cls.model_fields.items():
                fields.setdefault(name, (panel, field, []))[2].append(owner)
    for name, (panel, field, owners) in fields.items():
        text = field.description or ""
        if not text.split(" ")[0].endswith(":"):  # of a value that is written like this
            text = text[:1].upper() + text[1:]
        of = "" if panel == Solving.panel else f" ({', '.join(owners)})"
        if name in ("objective", "solver"):
            of = f": {', '.join(tables()[name])}"
        if name in tables() or _is_scalar(field.annotation):
            yield name, _made(field.annotation, f"{text}{of}.", panel)


def _is_scalar(kind: Any) -> bool:
    return kind is bool or kind in _METAVARS or get_origin(kind) is Literal


def _made(kind: Any, text: str, panel: str | None) -> Any:
    """A field of which a model can be made."""
    if kind is bool:
        return bool | None, option(description=text, panel=panel)
    metavar = "|".join(get_args(kind)) or _METAVARS.get(kind, "NAME")
    return str | None, option(description=text, panel=panel, metavar=metavar)
