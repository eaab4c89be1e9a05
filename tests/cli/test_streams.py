"""Output that cannot be printed, and names that are no text: clear words, whole results."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from forked_commands import run_mats
from torch import Tensor

Run = Callable[..., tuple[int, str, str]]
State = dict[str, Tensor]


@pytest.fixture
def models(make_state: Callable[..., State], save_model: Callable[..., Path]) -> list[str]:
    return [f"--model={save_model(f'm{i}', make_state(i))}" for i in range(2)]


def in_shell(line: str, **environment: str) -> CompletedProcess[str]:
    """Run a line of shell in which `mats` is the command."""
    return subprocess.run(
        ["bash", "-c", f'mats() {{ "{sys.executable}" -m matsmerge "$@"; }}; {line}'],
        capture_output=True,
        text=True,
        errors="backslashreplace",
        check=False,
        env=os.environ | environment,
    )


def fill_up(number: int) -> Callable[[], None]:
    """A disk without room behind a stream."""

    def prepare() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)

    return prepare


def test_a_full_disk_behind_standard_output(models: list[str], tmp_path: Path) -> None:
    out, full = tmp_path / "out", fill_up(1)
    result = run_mats("merge", *models, "-o", out, "-q", "--json", prepare=full)
    assert result.returncode == 1
    assert result.stderr == (
        "error: standard output: cannot be written (No space left on device)\n"
    )
    assert (out / "merge.json").exists()  # it was done all the same
    assert run_mats("schema", prepare=full).returncode == 1
    assert run_mats("--help", prepare=full).returncode == 1


def test_a_full_disk_behind_standard_error(models: list[str], tmp_path: Path) -> None:
    out, full = tmp_path / "out", fill_up(2)
    assert run_mats("merge", *models, "-o", out, prepare=full).returncode == 0
    assert (out / "merge.json").exists()
    assert run_mats("merge", prepare=full).returncode == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(models: list[str], tmp_path: Path, closed: str) -> None:
    out, plain = tmp_path / "out", tmp_path / "plain"
    assert in_shell(f"mats merge {' '.join(models)} -o {out} {closed}").returncode == 0
    assert run_mats("merge", *models, "-o", plain).returncode == 0
    for path in plain.iterdir():  # nothing was printed into a file that got the stream's number
        if path.name != "README.md":
            assert (out / path.name).read_bytes() == path.read_bytes()


def test_a_reader_that_has_seen_enough() -> None:
    result = in_shell("set -o pipefail; mats schema | head -1")
    assert (result.returncode, result.stdout, result.stderr) == (0, "{\n", "")
    result = in_shell("set -o pipefail; mats merge --help | true")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("option", ["-o", "--model", "--base", "--trace", "--statistics"])
def test_bytes_that_are_no_text(mats: Run, models: list[str], option: str, tmp_path: Path) -> None:
    code, _, err = mats("merge", *models, "-o", tmp_path / "out", option, "na\udcffme")
    assert code == 1
    assert "'na\\udcffme': holds bytes that are no UTF-8" in err
    assert not (tmp_path / "out").exists()


def test_a_folder_around_everything_that_is_no_text(models: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "a\udcff"
    folder.mkdir()

    def run(*arguments: str) -> CompletedProcess[str]:
        return run_mats(*arguments, prepare=lambda: os.chdir(folder))

    result = run("merge", *models, "-o", "out")
    assert result.returncode == 0, result.stderr
    result = run("report", "out")
    assert result.returncode == 0, result.stderr
    assert "written: report.html\n" in result.stdout


def know_ascii_only() -> None:
    """As of PYTHONIOENCODING=ascii."""
    for name in ("stdout", "stderr"):
        getattr(sys, name).reconfigure(encoding="ascii", errors="strict")


def test_a_terminal_that_knows_ascii_only(models: list[str], tmp_path: Path) -> None:
    assert run_mats("merge", "--help", prepare=know_ascii_only).returncode == 0
    out = tmp_path / "größe"
    result = run_mats("merge", *models, "-o", out, prepare=know_ascii_only)
    assert result.returncode == 0, result.stderr
    assert "2 models merged into" in result.stdout
    result = run_mats("inspect", "größe", prepare=know_ascii_only)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr


def test_a_system_without_a_language(models: list[str], tmp_path: Path) -> None:
    line = f"mats merge {' '.join(models)} -o {tmp_path}/größe"
    result = in_shell(line, LANG="C", LC_ALL="C")
    assert result.returncode == 0, result.stderr
    assert "2 models merged into" in result.stdout
