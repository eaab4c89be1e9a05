"""Options by name: read, written, and spread over depth."""

from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from matsmerge.methods import METHODS
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.methods.options import Options, at_depth, by_name, written
from matsmerge.methods.solvers import SOLVERS


class Inner(Options):
    name: ClassVar[str] = "inner"

    size: int = 3


class Outer(Options):
    name: ClassVar[str] = "outer"

    share: float = Field(0.5, ge=0, le=1, description="how much")
    inner: Inner = Inner()
    several: tuple[Inner, ...] = ()


class Nameless(Options):
    value: float = 1.0


def test_the_name_stands_beside_the_options() -> None:
    assert Outer.model_validate({"name": "outer", "share": 0.25}) == Outer(share=0.25)
    assert Outer(share=0.25).model_dump() == {
        "name": "outer",
        "share": 0.25,
        "inner": {"name": "inner", "size": 3},
        "several": (),
    }
    assert Nameless().model_dump() == {"value": 1.0}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "inner"}, "the name is outer, found 'inner'"),
        ({"name": None}, "the name is outer, found None"),
        ({"share": 2}, "less than or equal to 1"),
        ({"share": float("nan")}, "finite number"),
        ({"shares": 0.5}, "Extra inputs are not permitted"),
        ({"share": [0.5]}, "valid number"),  # lists are for depths alone
    ],
)
def test_what_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Outer.model_validate(data)


def test_a_name_is_an_option_of_what_has_none() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        Nameless.model_validate({"name": "x"})


def test_hints() -> None:
    assert Outer.hint("shar") == "; did you mean 'share'?"
    assert Outer.hint("zzz") == "; there is share, inner, several"


def test_what_a_recipe_would_say() -> None:
    made = Outer(inner=Inner(size=4), several=(Inner(), Inner(size=1)))
    plain = made.written()
    assert plain == {
        "name": "outer",
        "share": 0.5,
        "inner": {"name": "inner", "size": 4},
        "several": [{"name": "inner", "size": 3}, {"name": "inner", "size": 1}],
    }
    assert Outer.model_validate(plain) == made
    assert written(made, ["share"]) == {"name": "outer", "share": 0.5}
    assert Nameless().written() == {"value": 1.0}


@pytest.mark.parametrize(("depth", "expected"), [(0.0, 0.0), (0.25, 0.25), (0.5, 0.5), (1.0, 1.0)])
def test_lists_over_depth(depth: float, expected: float) -> None:
    found = Outer.model_validate({"share": [0, 0.5, 1]}, context={"depth": depth})
    assert found.share == expected


def test_every_number_of_a_list_is_checked() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Outer.model_validate({"share": [0, 2]}, context={"depth": 0.0})
    with pytest.raises(ValidationError):
        Outer.model_validate({"share": []}, context={"depth": 0.0})
    with pytest.raises(ValidationError):
        Inner.model_validate({"size": [1, 2]}, context={"depth": 0.0})


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6), st.floats(0, 1))
def test_between_its_neighbours(values: list[float], depth: float) -> None:
    found = at_depth(values, depth)
    position = depth * (len(values) - 1)
    near = values[int(position) : int(position) + 2]
    assert min(near) - 1e-9 <= found <= max(near) + 1e-9
    assert at_depth(values, 0.0) == values[0]
    assert at_depth(values, 1.0) == pytest.approx(values[-1])
    assert at_depth(3, depth) == 3
    assert at_depth("text", depth) == "text"


def test_schemas_say_that_numbers_may_be_lists() -> None:
    properties = Outer.model_json_schema()["properties"]
    assert properties["name"] == {"const": "outer"}
    assert properties["share"]["description"] == "how much"
    number, over_depth = properties["share"]["anyOf"]
    assert number == {"type": "number", "minimum": 0, "maximum": 1}
    assert over_depth == {"type": "array", "items": number, "minItems": 1}
    assert "name" not in Nameless.model_json_schema()["properties"]
    inner = Inner.model_json_schema()["properties"]["size"]
    assert inner["type"] == "integer"


def test_tables_are_by_name() -> None:
    assert by_name(Inner, Outer) == {"inner": Inner, "outer": Outer}


@pytest.mark.parametrize(
    "names", [METHODS, OBJECTIVES, SOLVERS], ids=["methods", "objectives", "solvers"]
)
def test_everything_that_recipes_name_is_written_as_it_is_read(names: Any) -> None:
    """What has no required options; those that do are read by other tests."""
    num_made = 0
    for name, cls in names.items():
        assert cls.name == name
        try:
            made = cls()
        except ValidationError:
            continue
        num_made += 1
        assert cls.model_validate(made.written()) == made
        assert cls.model_validate(made.model_dump()) == made
    assert num_made >= len(names) - 4
