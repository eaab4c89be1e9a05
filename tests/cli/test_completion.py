"""Shells complete commands and options of `mats`."""

from collections.abc import Callable

import pytest
from forked_commands import run_mats

Run = Callable[..., tuple[int, str, str]]


def test_the_script_is_shown(mats: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, out, err = mats("--show-completion", "bash")
    assert code == 0, err
    assert "_MATS_COMPLETE=complete_bash" in out


@pytest.mark.parametrize(
    ("typed", "found"), [("mats ex", "export"), ("mats export --gg", "--gguf")]
)
def test_a_shell_that_asks(typed: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_MATS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    result = run_mats()
    assert found in result.stdout.split(), result.stderr
