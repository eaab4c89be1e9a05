"""Output that cannot be printed, and names that are no text: clear words, whole results."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

State = dict[str, Tensor]


@pytest.fixture
def models(make_state: Callable[..., State], save_model: Callable[..., Path]) -> list[str]:
    return [f"--model={save_model(f'm{i}', make_state(i))}" for i in range(2)]


def in_shell(line: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of shell in which `mats` is the command."""
    return subprocess.run(
        ["bash", "-c", f'mats() {{ "{sys.executable}" -m matsmerge "$@"; }}; {line}'],
        capture_output=True,
        text=True,
        errors="backslashreplace",
        check=False,
        env=os.environ | environment,
    )


def test_a_full_disk_behind_standard_output(models: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = in_shell(f"mats merge {' '.join(models)} -o {out} -q --json > /dev/full")
    assert result.returncode == 1
    assert result.stderr == (
        "error: standard output: cannot be written (No space left on device)\n"
    )
    assert (out / "merge.json").exists()  # it was done all the same
    assert in_shell("mats schema > /dev/full").returncode == 1
    assert in_shell("mats --help > /dev/full").returncode == 1


def test_a_full_disk_behind_standard_error(models: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert in_shell(f"mats merge {' '.join(models)} -o {out} 2> /dev/full").returncode == 0
    assert (out / "merge.json").exists()
    assert in_shell("mats merge 2> /dev/full").returncode == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(models: list[str], tmp_path: Path, closed: str) -> None:
    out, plain = tmp_path / "out", tmp_path / "plain"
    assert in_shell(f"mats merge {' '.join(models)} -o {out} {closed}").returncode == 0
    assert in_shell(f"mats merge {' '.join(models)} -o {plain}").returncode == 0
    for path in plain.iterdir():  # nothing was printed into a file that got the stream's number
        if path.name != "README.md":
            assert (out / path.name).read_bytes() == path.read_bytes()


def test_a_reader_that_has_seen_enough() -> None:
    result = in_shell("set -o pipefail; mats schema | head -1")
    assert (result.returncode, result.stdout, result.stderr) == (0, "{\n", "")
    result = in_shell("set -o pipefail; mats merge --help | true")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("option", ["-o", "--model", "--base", "--trace", "--statistics"])
def test_bytes_that_are_no_text(models: list[str], option: str, tmp_path: Path) -> None:
    line = f"cd {tmp_path}; mats merge {' '.join(models)} -o out {option} $'na\\xffme'"
    result = in_shell(line)
    assert result.returncode == 1
    assert "'na\\udcffme': holds bytes that are no UTF-8" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_around_everything_that_is_no_text(models: list[str], tmp_path: Path) -> None:
    line = f"cd {tmp_path}; mkdir $'a\\xff'; cd $'a\\xff'; mats merge {' '.join(models)} -o out"
    result = in_shell(line)
    assert result.returncode == 0, result.stderr
    result = in_shell(f"cd {tmp_path}/a*; mats report out")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("written: report.html\n")


@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "ascii"}, {"LANG": "C", "LC_ALL": "C"}]
)
def test_a_terminal_that_knows_ascii_only(
    models: list[str], tmp_path: Path, environment: dict[str, str]
) -> None:
    assert in_shell("mats merge --help", **environment).returncode == 0
    result = in_shell(f"mats merge {' '.join(models)} -o {tmp_path}/größe", **environment)
    assert result.returncode == 0, result.stderr
    assert "2 models merged into" in result.stdout
    result = in_shell("mats inspect größe", **environment)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
