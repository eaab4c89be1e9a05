"""Gathering and saying problems; pydantic's errors as sentences."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from matsmerge.errors import CheckpointError, DataError, RecipeError
from matsmerge.problems import counted, listed, noted, problems_of, reworded, shortened


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int = Field(1, ge=0)
    file: str = Field("", validation_alias="path")


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["a", "b"] = "a"
    one: Inner | None = None
    many: list[Inner] = Field(default_factory=list, max_length=3)
    named: dict[str, Inner | str] = Field(default_factory=dict)
    needed: int

    @field_validator("needed")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"{value} is odd\nand so on")
        return value


@pytest.mark.parametrize(
    ("data", "problems"),
    [
        ({}, ["needed: is required"]),
        ({"needed": "x"},
         ["needed: input should be a valid integer, unable to parse string as an integer, "
          "found 'x'"]),
        ({"needed": 3}, ["needed: 3 is odd", "needed: and so on"]),
        ({"needed": 2, "kin": "a"}, ["unknown key 'kin'; did you mean 'kind'?"]),
        ({"needed": 2, "one": {"sise": 3}}, ["one: unknown key 'sise'; did you mean 'size'?"]),
        ({"needed": 2, "one": {"pth": 3}}, ["one: unknown key 'pth'; did you mean 'path'?"]),
        ({"needed": 2, "many": [{}, {"size": -1}]},
         ["many.1.size: input should be greater than or equal to 0, found -1"]),
        ({"needed": 2, "named": {"x": {"sise": 1}}},
         ["named.x: unknown key 'sise'; did you mean 'size'?",
          "named.x: input should be a valid string, found {'sise': 1}"]),
        ({"needed": 2, "many": [{}] * 4},
         ["many: list should have at most 3 items after validation, not 4"]),
        ({"needed": "x" * 1000},
         ["needed: input should be a valid integer, unable to parse string as an integer"]),
        ({"kind": "c"},
         ["kind: input should be 'a' or 'b', found 'c'", "needed: is required"]),
    ],
)  # fmt: skip
def test_sentences(data: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(ValidationError) as error:
        Outer.model_validate(data)
    assert problems_of(error.value, Outer) == problems


def test_hints() -> None:
    with pytest.raises(ValidationError) as error:
        Outer.model_validate({"needed": 2, "weight": 1})
    assert problems_of(error.value) == ["unknown key 'weight'; it takes none"]


def test_all_problems_at_once() -> None:
    problems = ["one"]
    for told in (["one", "two"], ["three"]):
        with noted(problems, DataError, before="x: " if told == ["three"] else ""):
            raise DataError(told)
    with pytest.raises(RecipeError), noted(problems, DataError):
        raise RecipeError("of another type")
    with pytest.raises(CheckpointError) as error:
        CheckpointError.raise_all(problems)
    assert error.value.problems == ["one", "two", "x: three"]
    CheckpointError.raise_all([])


def test_saying_more() -> None:
    with (
        pytest.raises(DataError, match="^file: odd; fix it$"),
        reworded(before="file: ", after="; fix it"),
    ):
        raise DataError("odd")
    with pytest.raises(RecipeError, match="^odd$"), reworded(error_type=RecipeError):
        raise DataError("odd")


def test_listing() -> None:
    names = list("abcd")
    assert (listed(names), listed(names, 2)) == ("a, b, c, d", "a, b and 2 more")
    assert (shortened(names), shortened(names, 2)) == (names, ["a", "b", "and 2 more"])
    assert (counted(names, "id"), counted(["a"], "id")) == ("4 ids", "1 id")
