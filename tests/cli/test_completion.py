"""Shells complete commands and options of `mats`."""

import subprocess
import sys
from collections.abc import Callable
from os import environ

import pytest

Run = Callable[..., tuple[int, str, str]]


def test_the_script_is_shown(mats: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, out, err = mats("--show-completion", "bash")
    assert code == 0, err
    assert "_MATS_COMPLETE=complete_bash" in out


@pytest.mark.parametrize(
    ("typed", "found"), [("mats ex", "export"), ("mats export --gg", "--gguf")]
)
def test_a_shell_that_asks(typed: str, found: str) -> None:
    asked = {"_MATS_COMPLETE": "complete_bash", "COMP_WORDS": typed}
    asked["COMP_CWORD"] = str(len(typed.split()) - 1)
    result = subprocess.run(
        [sys.executable, "-m", "matsmerge"],
        capture_output=True,
        text=True,
        env={**environ, **asked},
        check=False,
    )
    assert found in result.stdout.split(), result.stderr
