"""What `--help` shows: two columns that can be read on a terminal of 80 columns.

Flags stand in full, in a narrow column; a name that is too long for it has a line of its own. What
a flag does has the rest of the line.
"""

import inspect
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

_INDENT = 2
_NAMES = 24  # columns of the names, with what parts them from the text
_WIDEST = 100  # longer lines are hard to follow


class HelpedCommand(TyperCommand):
    """A command whose help is laid out here."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        _print_help(self, ctx)


class HelpedGroup(TyperGroup):
    """Several commands whose help is laid out here."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        _print_help(self, ctx)


def usage(command: Any, context: Any) -> str:
    """`mats merge [OPTIONS] [RECIPE | MODEL...]`."""
    names = [param_names(p) for p in shown_params(command, context) if _is_argument(p)]
    commands = ["COMMAND [ARGS]..."] if hasattr(command, "commands") else []
    return " ".join([context.command_path, "[OPTIONS]", *names, *commands])


def param_names(param: Any) -> str:
    """`-o, --out FOLDER`, `--bias / --no-bias`; of arguments `MODEL...`, if optional `[MODEL]`."""
    if _is_argument(param):
        name = param.metavar or f"{param.name.upper()}{'' if param.nargs == 1 else '...'}"
        return name if param.required or name.startswith("[") else f"[{name}]"
    names = ", ".join(sorted(param.opts, key=len))
    if param.secondary_opts:
        names += f" / {', '.join(param.secondary_opts)}"
    return names if param.is_flag else f"{names} {param.metavar or 'VALUE'}"


def param_text(param: Any) -> str:
    """What an option does, with its default."""
    text = param.help or ""
    if param.required:
        return f"{text} [required]"
    value = param.default
    is_shown = param.show_default and isinstance(value, int | float | str | Path)
    return f"{text} [default: {value}]" if is_shown and not param.is_flag else text


def shown_params(command: Any, context: Any) -> list[Any]:
    """The arguments and options that a command's help is about."""
    return [p for p in command.get_params(context) if not getattr(p, "hidden", False)]


def _print_help(command: Any, context: Any) -> None:
    from matsmerge.cli.consoles import stdout

    width = min(stdout.width, _WIDEST)
    stdout.print(f"Usage: {usage(command, context)}", style="bold", soft_wrap=True)
    stdout.print()
    stdout.print(_about_text(command.help or "", width), soft_wrap=True)
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in sorted(shown_params(command, context), key=lambda p: not _is_argument(p)):
        title = "Arguments" if _is_argument(param) else getattr(param, "rich_help_panel", None)
        sections.setdefault(title or "Options", []).append((param_names(param), param_text(param)))
    # The help of `--help` comes before the options of panels, which are about something narrower.
    first = [title for title in ("Arguments", "Options") if title in sections]
    for title in [*first, *(t for t in sections if t not in first)]:
        _print_section(title, sections[title], width)
    if hasattr(command, "commands"):
        entries = [
            (name, _about_text((c.short_help or c.help or "").split("\n\n")[0], 10**6))
            for name, c in command.commands.items()
            if not c.hidden
        ]
        _print_section("Commands", entries, width)


def _print_section(title: str, entries: Iterable[tuple[str, str]], width: int) -> None:
    from matsmerge.cli.consoles import stdout

    stdout.print()
    stdout.print(title, style="bold", soft_wrap=True)
    for name, text in entries:
        first, *others = textwrap.wrap(text, width - _NAMES) or [""]
        is_narrow = _INDENT + len(name) + 2 <= _NAMES
        stdout.print(" " * _INDENT + name, style="cyan", end="", soft_wrap=True)
        gap = " " * (_NAMES - _INDENT - len(name)) if is_narrow else "\n" + " " * _NAMES
        lines = [gap + first, *(" " * _NAMES + line for line in others)]
        stdout.print("\n".join(lines), soft_wrap=True)


def _about_text(text: str, width: int) -> str:
    """A docstring: its paragraphs wrapped, its commands as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    shown = []
    for paragraph in paragraphs:
        if paragraph.startswith((" ", "mats ")):
            shown.append(textwrap.indent(textwrap.dedent(paragraph), " " * _INDENT))
        else:
            shown.append(textwrap.fill(" ".join(paragraph.split()), width))
    return "\n\n".join(shown)


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")
