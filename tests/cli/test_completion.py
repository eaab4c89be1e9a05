"""Shells complete commands and options of `mats`."""

from collections.abc import Callable

import pytest
import typer
from forked_commands import run_mats

from matsmerge.cli import commands

Run = Callable[..., tuple[int, str, str]]


def test_the_script_is_shown(mats: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setattr(commands, "_made", commands._made.__wrapped__)  # which is where it is read
    code, out, err = mats("--show-completion", "bash")
    assert code == 0, err
    assert "_MATS_COMPLETE=complete_bash" in out


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("mats ex", "export"),
        ("mats export --gg", "--gguf"),
        ("mats merge --method ti", "ties"),
        ("mats merge --objective k", "kfac"),
        ("mats merge --trim g", "global"),
        ("mats init --method mats_", "mats_kfac"),
        ("mats merge --executor r", "ray"),
        ("mats experiment run text", "text-small"),
        ("mats experiment ru", "run"),
    ],
)
def test_a_shell_that_asks(typed: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_MATS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    result = run_mats()
    assert found in result.stdout.split(), result.stderr


def test_only_the_command_that_is_typed_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def make(*names: str) -> object:
        asked.extend(names)
        return typer.main.get_command(commands.make_app())

    monkeypatch.setattr(commands, "_made", make)
    for name in ("COMP_WORDS", "_TYPER_COMPLETE_ARGS"):  # bash; zsh and fish
        monkeypatch.setenv("_MATS_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "")
        monkeypatch.setenv("COMP_CWORD", "1")
        monkeypatch.setenv(name, "mats export --gg")
        commands.call([])
    assert asked == ["export", "export"]
