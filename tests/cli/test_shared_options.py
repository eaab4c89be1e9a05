"""Options that several commands have."""

import pytest

from matsmerge.cli.shared_options import parse_pairs
from matsmerge.errors import RecipeError


def test_pairs() -> None:
    def parse(text: str) -> dict[str, str]:
        return parse_pairs("--columns", text.split(","), "names as in text=sentence")

    assert parse("text=sentence, label = gold") == {"text": "sentence", "label": "gold"}
    for text, message in (
        ("text", "--columns: expected names as in text=sentence, found 'text'"),
        ("text=", "found 'text='"),
        ("=x", "found '=x'"),
        ("", "found ''"),
        ("a=b,a=c", "--columns: 'a' is given twice"),
    ):
        with pytest.raises(RecipeError, match=message):
            parse(text)
