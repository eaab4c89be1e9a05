"""Names are printed as they are: no emoji, no markup."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich._emoji_codes import EMOJI
from torch import Tensor

from matsmerge.cli import commands
from matsmerge.cli.display import JsonScreen, Screen

Run = Callable[..., tuple[int, str, str]]
NAME = "[red]a:100:b[-]"
PICTURES = {
    picture for picture in EMOJI.values() if not picture.isascii() and picture not in "©®™✔"
}


def all_commands() -> list[list[str]]:
    import typer

    def below(command: object, path: list[str]) -> list[list[str]]:
        found = [path]
        for name, other in getattr(command, "commands", {}).items():
            found += below(other, [*path, name])
        return found

    return below(typer.main.get_command(commands.make_app(*commands.COMMANDS)), [])


@pytest.mark.parametrize("path", all_commands(), ids=lambda path: " ".join(path) or "mats")
def test_help_has_no_pictures(mats: Run, path: list[str]) -> None:
    code, out, _ = mats(*path, "--help")
    assert code == 0
    assert not [picture for picture in PICTURES if picture in out]


def test_help_says_ranges(mats: Run) -> None:
    for command in ("merge", "tune"):
        _, out, _ = mats(command, "--help")
        assert "10:100:10" in out


def test_messages(mats: Run, tmp_path: Path) -> None:
    for name in (NAME, "[/]", "[/red]", ":smile:", "[link=x]"):
        code, _, err = mats("inspect", name)
        assert code == 1
        assert f"error: {name}: no such file" in err
    code, _, err = mats("merge", "--model", "x", "--trajectory", "10:100:x", "-o", tmp_path / "o")
    assert code == 1
    assert "found '10:100:x'" in err


def test_names_of_folders_and_tensors(
    mats: Run, tmp_path: Path, save_model: Callable[..., Path]
) -> None:
    tensors: dict[str, Tensor] = {NAME: torch.ones(3, 2), "[/]": torch.ones(2)}
    first = save_model(f"1{NAME}", tensors)
    second = save_model(f"2{NAME}", {NAME: torch.zeros(3, 2), "[/]": torch.ones(2)})
    code, out, err = mats("inspect", first, second)
    assert code == 0, err
    assert NAME in out
    code, out, err = mats("inspect", first)
    assert code == 0, err
    assert str(first) in "".join(line.strip() for line in out.splitlines())  # folded
    code, out, err = mats("merge", "--model", first, "--model", second, "-o", tmp_path / NAME)
    assert code == 0, err
    assert f"2 models merged into {tmp_path / NAME}" in out.replace("\n", "")


def test_tables_bars_and_what_is_going_on(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.table(("first", NAME), [("[/]", ":100:")], title=NAME)
    with screen.status(NAME), screen.bars() as bars:
        bars.stage(f"[/]{NAME}", 10)
        bars.advance(10)
    screen.notes([NAME])
    found = capsys.readouterr()
    assert all(part in found.out for part in (NAME, "[/]", ":100:"))
    assert f"[/]{NAME}" in found.err
    assert f"note: {NAME}" in found.err


def show_everything(screen: JsonScreen) -> None:
    with screen.status("working"), screen.bars() as bars:
        bars.stage("stage", 1)
        bars.note("in between")
    screen.notes(["decided"])
    screen.result({"a": 1})
    screen.say("text")
    screen.table(("column",), [("cell",)])


def test_screens_show_what_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    show_everything(JsonScreen())
    out, err = capsys.readouterr()
    assert out.split() == ["text", "column", "cell"]
    assert all(part in err for part in ("stage", "in between", "note: decided"))
    show_everything(JsonScreen(as_json=True))
    assert capsys.readouterr() == ('{\n  "a": 1\n}\n', "note: decided\n")
    show_everything(JsonScreen(quiet=True))
    assert capsys.readouterr() == ("", "")


def test_nothing_is_drawn_where_nothing_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen().bars():
        pass
    assert capsys.readouterr().err == ""
    with Screen().bars() as bars:
        bars.stage("merging", 2, "layers")
        bars.advance(2)
    assert capsys.readouterr().err.count("\n") == 1
