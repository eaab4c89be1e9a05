"""Options of a command from the fields of a model."""

from pathlib import Path
from typing import Any, Literal

import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from matsmerge.cli.field_options import CommandOptions, option, takes_options


class Some(CommandOptions):
    panel = "Some of them"

    some_rate: float | None = option(flag="--rate", short="-r")
    """How fast, with a line
    that is broken."""

    names: list[str] | None = None
    patterns: list[str] = option([])
    count: int | None = option(zero=True, ge=1, le=9)
    size: int = option(3, ge=1, lt=5)
    check_: bool = option(True, alias="check", flag="--no-check")
    fast: bool = False
    sure: bool | None = option(panel="Others")
    way: Literal["a", "b"] = "a"


class Plain(BaseModel):
    """A model of pydantic's own, whose fields say everything themselves."""

    place: Path = Field(Path("here"), description="where it is")


def run(*arguments: str) -> dict[str, Any] | str:
    found: dict[str, Any] = {}

    @takes_options
    def command(some: Some, plain: Plain, out: str = "x") -> None:
        found.update(some.model_dump(by_alias=True), place=plain.place, out=out)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    return found if found else str(result.exception or "") + result.output


def test_defaults_are_the_fields() -> None:
    expected = Some().model_dump(by_alias=True)
    assert run() == {**expected, "place": Path("here"), "out": "x"}


def test_what_is_given() -> None:
    found = run(
        "--rate=0.5", "--names=a, b", "--patterns=c", "--patterns=d", "--count=2", "--size=4",
        "--no-check", "--fast", "--no-sure", "--way=b", "--out=y", "--place=there",
    )  # fmt: skip
    assert found == {
        "some_rate": 0.5, "names": ["a", "b"], "patterns": ["c", "d"], "count": 2, "size": 4,
        "check": False, "fast": True, "sure": False, "way": "b", "out": "y", "place": Path("there"),
    }  # fmt: skip
    assert run("--count=0") == run()
    at_home = run("--place=~/there")
    assert isinstance(at_home, dict)
    assert at_home["place"] == Path.home() / "there"


def test_limits_are_the_fields() -> None:
    for wrong in ("--count=10", "--size=0", "--size=5", "--rate=nan"):
        assert isinstance(run(wrong), str)
    assert "way: input should be 'a' or 'b', found 'c'" in run("--way=c")


def test_help_is_what_fields_say() -> None:
    shown = " ".join(str(run("--help")).replace("│", " ").split())
    for part in ("How fast, with a line that is broken.", "where it is", "Some of them", "Others"):
        assert part in shown
