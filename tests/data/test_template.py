"""Templates and wordings: what they put into text, and what they refuse."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from matsmerge.data.template import Template, Wording, Wordings
from matsmerge.errors import DataError

PLAIN = st.text(st.characters(codec="ascii", exclude_characters="{}"), max_size=10)


@given(PLAIN, PLAIN, st.text(max_size=10), st.integers())
def test_columns_are_put_in_their_places(before: str, after: str, text: str, number: int) -> None:
    template = Template(f"{before}{{a}}{after}{{b}}{{a}}")
    assert template.columns == ["a", "b", "a"]
    assert template.fill({"a": text, "b": number}) == f"{before}{text}{after}{number}{text}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{a}} {a}", "{a} x"),
        ("{a}}}", "x}"),
        ("{{{a}}}", "{x}"),
        ("{two words}", "y"),
        ("{0}", "z"),
    ],
)
def test_braces_and_names(text: str, expected: str) -> None:
    assert Template(text).fill({"a": "x", "two words": "y", "0": "z"}) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Single '{' encountered.*; write a brace itself as {{"),
        ("}", "Single '}' encountered"),
        ("{a", "expected '}'"),
        ("{}", "expected the plain name of a column in braces, found '{}'"),
        ("{a.b}", r"found '{a\.b}'"),
        ("{a[0]}", r"found '{a\[0\]}'"),
        ("{a!r}", "found '{a!r}'"),
        ("{a:>10}", "found '{a:>10}'"),
        ("{a!s:5}", "found '{a!s:5}'"),
        ("no column", "template 'no column': names no column in braces"),
        ("", "template '': names no column in braces"),
    ],
)
def test_what_is_no_template(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Template(text)


def test_answers_need_no_columns() -> None:
    assert Template("yes", needs_columns=False).fill({}) == "yes"
    assert Template("", needs_columns=False).fill({}) == ""


@pytest.mark.parametrize("value", [None, True, [1], {"a": 1}])
def test_values_that_are_no_text(value: Any) -> None:
    with pytest.raises(DataError, match="'a': expected text for the template, found"):
        Template("{a}").fill({"a": value})


def test_a_column_that_a_row_lacks() -> None:
    with pytest.raises(DataError, match="'b': expected text for the template"):
        Template("{a}{b}").fill({"a": "x"})


def test_columns_that_the_data_has_not() -> None:
    template = Template("{premis} {hypothesis} {premis}")
    assert template.problems("data", ["premise", "hypothesis"]) == [
        "data: has no column 'premis', which the template names; did you mean 'premise'?"
    ]
    assert template.problems("data", ["premis", "hypothesis"]) == []


def wordings(*texts: str, seed: int = 0, **more: Any) -> Wordings:
    return Wordings([Wording(text=text, **more) for text in texts], seed)


def test_each_row_has_one_wording_for_good() -> None:
    made = wordings("first {a}", "second {a}", "third {a}")
    found = [made.fill({"a": "x"}, number, "input")["input"] for number in range(300)]
    assert found == [made.fill({"a": "x"}, number, "input")["input"] for number in range(300)]
    counts = Counter(text.split()[0] for text in found)
    assert all(70 < counts[word] < 130 for word in ("first", "second", "third"))
    others = wordings("first {a}", "second {a}", "third {a}", seed=1)
    assert found != [others.fill({"a": "x"}, number, "input")["input"] for number in range(300)]


def test_answers_of_wordings() -> None:
    made = wordings("{a}?", choices=["yes, {a}", "no"], target="{b}")
    assert made.fill({"a": "x", "b": "y"}, 0, "text") == {
        "text": "x?", "choices": ["yes, x", "no"], "target": "y",
    }  # fmt: skip
    assert made.answers_filled == {"choices", "target"}


def test_an_answer_may_be_empty() -> None:
    made = wordings("{a}", target="")
    assert made.fill({"a": "x"}, 0, "text") == {"text": "x", "target": ""}
    assert made.answers_filled == {"target"}


def test_only_what_all_wordings_fill_is_filled() -> None:
    made = Wordings([Wording(text="{a}", target="x"), Wording(text="{a}", choices=["y", "z"])])
    assert made.answers_filled == set()


def test_problems_of_all_wordings_once() -> None:
    made = Wordings(
        [Wording(text="{a}"), Wording(text="{a} {b}", choices=["{c}", "x"], target="{d}")]
    )
    found = made.problems("data", ["d"])
    assert [problem.split("'")[1] for problem in found] == ["a", "b", "c"]
    assert made.problems("data", list("abcd")) == []


@pytest.mark.parametrize(
    "wrong", [{}, {"text": 3}, {"text": "x", "choices": ["one"]}, {"text": "x", "answer": "y"}]
)
def test_what_is_no_wording(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Wording.model_validate(wrong)
