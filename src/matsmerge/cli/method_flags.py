"""Flags of `mats merge` for methods, and for the options of methods, objectives and solvers.

They are made from what is known of the classes, which take seconds to import. `--scale 0.3` is the
same as `--set scale=0.3`.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import typer
from pydantic import create_model

from matsmerge.cli.field_options import flag_of, option, takes_options
from matsmerge.cli.help_page import HelpedCommand
from matsmerge.cli.merge_options import Solving, WithoutFile
from matsmerge.errors import RecipeError
from matsmerge.recipes.known_options import known_parts

_METAVARS = {"float": "NUMBER", "int": "INTEGER", "str": "TEXT", "part": "NAME", "names": "NAMES"}


class MergeCommand(HelpedCommand):
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

    method = {}
    for key, given in flags.items():
        value = ",".join(given) or None if isinstance(given, (list, tuple)) else given
        if value is not None:
            is_text = isinstance(value, str)
            method[key] = parse_yaml(value, flag_of(key), RecipeError) if is_text else value
    if "method" in method:
        method["name"] = method.pop("method")
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise RecipeError(f"--set: expected NAME=VALUE, as in scale=0.3, found '{text}'")
        from matsmerge.recipes.method_spec import set_parameter

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
    methods, objectives, solvers = known_parts().values()
    text = f"How to merge: {', '.join(methods)}."
    yield "method", _made("part", text, WithoutFile.panel, methods)
    solving = {name: own for name, own in methods.items() if own.keys() & known_parts().keys()}
    others = {name: own for name, own in methods.items() if name not in solving}
    fields: dict[str, tuple[str, str | None, str, list[str]]] = {}
    for panel, table in (
        ("Options of methods, also as the init of mats", others),
        (Solving.panel, solving),
        ("Options of objectives", objectives),
        ("Options of solvers", solvers),
    ):
        for owner, own in table.items():
            for name, (kind, text, _) in own.items():
                fields.setdefault(name, (panel, kind, text, []))[3].append(owner)
    for name, (panel, kind, text, owners) in fields.items():
        if not text.split(" ")[0].endswith(":"):  # of a value that is written like this
            text = text[:1].upper() + text[1:]
        of = "" if panel == Solving.panel else f" ({', '.join(owners)})"
        if name in ("objective", "solver"):
            of = f": {', '.join(known_parts()[name])}"
        if kind is not None:
            values = known_parts().get(name, ())
            yield name, _made(kind, f"{text}{of}.", panel, values)


def _made(kind: str, text: str, panel: str | None, values: Iterable[str] = ()) -> Any:
    """A field of which a model can be made."""
    if kind == "bool":
        return bool | None, option(description=text, panel=panel)
    if kind == "names":
        return list[str], option([], description=f"{text} Repeatable.", panel=panel, metavar="NAME")
    known = list(values) or (kind.split("|") if "|" in kind else None)
    metavar = _METAVARS.get(kind, kind)
    return str | None, option(description=text, panel=panel, metavar=metavar, values=known)
