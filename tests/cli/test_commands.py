"""The table of commands, which are imported when they are called."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import typer

from matsmerge.cli import commands

Run = Callable[..., tuple[int, str, str]]


def test_summaries_are_what_the_commands_say() -> None:
    whole: Any = typer.main.get_command(commands.make_app(*commands.COMMANDS))
    assert list(whole.commands) == list(commands.COMMANDS)
    for name, command in commands.COMMANDS.items():
        first, _, _ = inspect.cleandoc(whole.commands[name].help).partition("\n\n")
        assert command.summary == " ".join(first.split()), name


def test_only_what_is_called_is_imported() -> None:
    code = (
        "import sys; from matsmerge.cli import commands; commands.call(['schema', '--help']); "
        "print([n for n, c in commands.COMMANDS.items() if c.module in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip().endswith("['schema']")


def test_a_command_that_there_is_not(mats: Run) -> None:
    code, _, err = mats("merg")
    assert code == 1
    assert "No such command 'merg'. Did you mean" in err
    assert "merge" in err
