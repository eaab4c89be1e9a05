"""The table of commands, which are imported when they are called."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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


def test_options_are_made_once(mats: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mats("schema")[0] == 0
    monkeypatch.setattr(commands, "make_app", None)
    assert mats("schema")[0] == 0


def test_a_command_that_there_is_not(mats: Run) -> None:
    code, _, err = mats("merg")
    assert code == 1
    assert "No such command 'merg'. Did you mean" in err
    assert "merge" in err


def test_a_wrong_recipe_is_refused_before_the_command_is_imported(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("models: [a, b]\nbsae: c\nmethod: ties\n")
    code = (
        "import sys; from matsmerge.cli.main import run; "
        "print(run(['merge', 'wrong.yaml', '-o', 'out']), 'matsmerge.cli.merge_command' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["1", "False"]
    assert result.stderr.strip() == "error: wrong.yaml: unknown key 'bsae'; did you mean 'base'?"


def test_the_help_of_a_command_does_not_look_at_recipes(mats: Run, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("bsae: c\n")
    code, out, _ = mats("merge", tmp_path / "wrong.yaml", "--help")
    assert code == 0
    assert "Usage" in out


def test_a_wrong_option_names_the_help_to_read(mats: Run) -> None:
    assert "see mats push --help" in mats("push", "--nope")[2]
    assert "see mats --help" in mats("nope")[2]
