import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from matsmerge.markdown_text import escape, fenced, table_of

NAMES = [
    "a|b",
    "<script>alert(1)</script>",
    "two\nlines",
    "`code`",
    "# no heading",
    "[text](https://example.org)",
    "![picture](x.png)",
    "a & b &lt; c &amp;",
    "**bold** _slanted_ ~~struck~~ snake_case",
    "1. no list",
    "- no list",
    "+ no list",
    "=====",
    "> no quote",
    "back\\slash\\|",
    "$x$",
    "<!-- gone",
]


def shown(markdown: str) -> str:
    """What a reader sees of it, without tags."""
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown)
    return html.unescape(re.sub("<[^>]*>", "", page)).strip()


@pytest.mark.parametrize("text", NAMES)
def test_text_is_shown_as_it_is(text: str) -> None:
    plain = " ".join(text.split())
    assert shown(escape(text)) == plain
    assert shown(f"# {escape(text)}") == plain
    assert shown(f"- {escape(text)}") == plain
    table = shown(f"| model | weight |\n|---|---|\n| {escape(text)} | 1 |\n")
    assert [line for line in table.splitlines() if line] == ["model", "weight", plain, "1"]


@given(st.text())
def test_one_line_without_markup(text: str) -> None:
    found = escape(text)
    assert found.isprintable()
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(f"x {found} x")
    assert re.fullmatch("<p>[^<>]*</p>\n?", page)


def test_unprintable() -> None:
    assert escape("a\x1b[31mb\x00") == "a�\\[31mb�"
    assert escape("a\udcffb") == "a?b"


def test_fences() -> None:
    for code in ("a: b\n", "a: b", "```\n````\n"):
        markdown = fenced(code, "yaml")
        (token,) = MarkdownIt("commonmark").parse(markdown)
        assert (token.type, token.info) == ("fence", "yaml")
        assert token.content.rstrip("\n") == code.rstrip("\n")


def test_a_table() -> None:
    made = table_of(("", "a|b"), [("x", 1), ("*y*", "2\n3")])
    assert made.splitlines()[1] == "| --- | ---: |"
    assert shown(made).split() == ["a|b", "x", "1", "*y*", "2", "3"]
