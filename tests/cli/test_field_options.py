"""Options of a command from the fields of a model."""

from typing import Any, Literal

import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from matsmerge.cli.field_options import takes_options_of, values_of


def field(default: Any, **settings: Any) -> Any:
    shown: dict[str, Any] = {k: settings.pop(k) for k in ("flag", "zero") if k in settings}
    return Field(default, description="about it", json_schema_extra=shown, **settings)


class Options(BaseModel):
    some_rate: float | None = field(None, flag="--rate")
    names: list[str] | None = field(None)
    patterns: list[str] = Field(default_factory=list, description="p", json_schema_extra={})
    count: int | None = field(None, ge=1, le=9, zero=True)
    size: int = field(3, ge=1, lt=5)
    check_: bool = field(True, alias="check", flag="--no-check")
    fast: bool = field(False)
    way: Literal["a", "b"] = field("a")


def run(*arguments: str) -> dict[str, Any] | str:
    found: dict[str, Any] = {}

    @takes_options_of(Options)
    def command(out: str = "x", **options: Any) -> None:
        found.update(values_of(Options, options), out=out)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    return found if result.exit_code == 0 else result.output


def test_defaults_are_the_fields() -> None:
    expected = Options().model_dump(by_alias=True)
    assert run() == {**expected, "out": "x"}


def test_what_is_given() -> None:
    found = run(
        "--rate=0.5", "--names=a, b", "--patterns=c", "--patterns=d", "--count=2", "--size=4",
        "--no-check", "--fast", "--way=b", "--out=y",
    )  # fmt: skip
    assert found == {
        "some_rate": 0.5, "names": ["a", "b"], "patterns": ["c", "d"], "count": 2, "size": 4,
        "check": False, "fast": True, "way": "b", "out": "y",
    }  # fmt: skip
    assert run("--count=0") == run()


def test_limits_are_the_fields() -> None:
    for wrong in ("--count=10", "--size=0", "--size=5"):
        assert isinstance(run(wrong), str)
