"""What `--help` shows, on a terminal of 80 columns."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from matsmerge.cli.commands import COMMANDS, make_app
from matsmerge.cli.help_page import param_names, shown_params

Run = Callable[..., tuple[int, str, str]]


def all_commands() -> Iterator[tuple[list[str], Any]]:
    def below(command: Any, path: list[str]) -> Iterator[tuple[list[str], Any]]:
        yield path, command
        for name, other in getattr(command, "commands", {}).items():
            yield from below(other, [*path, name])

    yield from below(typer.main.get_command(make_app(*COMMANDS)), [])


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matsmerge.cli.consoles.stdout._width", 80)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(p, c, id=" ".join(p) or "mats") for p, c in all_commands()]
)
def test_fits_into_80_columns_with_every_name_in_full(
    mats: Run, path: list[str], command: Any
) -> None:
    code, out, err = mats(*path, "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith(f"Usage: {' '.join(['mats', *path])} [OPTIONS]")
    assert not [mark for mark in ("…", "<bool>", "[[", "\\:") if mark in out]
    context = command.make_context("mats", [], resilient_parsing=True)
    starts = [line.strip() for line in out.splitlines()]
    for param in shown_params(command, context):
        name = param_names(param)
        if param.name != "help":
            assert any(line == name or line.startswith(f"{name}  ") for line in starts), name


@pytest.mark.usefixtures("narrow")
def test_what_is_in_it(mats: Run) -> None:
    _, out, _ = mats("merge", "--help")
    assert "Usage: mats merge [OPTIONS] [RECIPE | MODEL...]\n" in out
    assert "  -o, --out FOLDER      Folder to write the merged model to, here or in a" in out
    assert "  --match-heads / --no-match-heads\n                        Match each" in out
    assert "--statistics a.safetensors --statistics c.safetensors --out merged" in out
    assert out.index("\nArguments\n") < out.index("\nOptions\n") < out.index("\nRunning\n")
    _, out, _ = mats("collect", "--help")
    assert "Usage: mats collect [OPTIONS] MODEL...\n" in out
    assert "[required]" in out
    assert "  --seed INTEGER        Of everything random. [default: 0]\n" in out
    assert "  --dry-run             Check everything, say what it would take, collect\n" in out
    _, out, _ = mats("report", "--help")
    assert "-o, --out FILE" in out


def test_lines_are_no_longer_on_a_wide_terminal_than_can_be_followed(
    mats: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("matsmerge.cli.consoles.stdout._width", 200)
    lines = mats("collect", "--help")[1].splitlines()
    assert 80 < max(map(len, lines)) <= 100


@pytest.mark.usefixtures("narrow")
def test_groups_list_their_commands(mats: Run) -> None:
    _, out, _ = mats("--help")
    for name, command in COMMANDS.items():
        assert f"\n  {name} " in out
        assert " ".join(command.summary.split()) in " ".join(out.split())
    _, out, _ = mats("stats", "--help")
    assert "\nCommands\n  combine               Add up statistics of one model" in out


def test_names_of_arguments_say_whether_they_are_needed() -> None:
    """As `[MODEL]` if not, and with dots where there may be several."""

    def names(path: str) -> list[str]:
        command = next(c for p, c in all_commands() if p == path.split())
        context = command.make_context("mats", [], resilient_parsing=True)
        return [param_names(p) for p in shown_params(command, context) if p.name != "help"]

    assert names("stats combine")[0] == "FILES..."
    assert names("cost")[0] == "[RECIPE]"
    assert names("inspect")[0] == "PATH"
    assert "--watch" in names("tune")  # a switch has no value
    assert "--loss mean|sum" in names("train")
