"""Sizes as people write and read them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matsmerge.byte_sizes import format_bytes, parse_bytes
from matsmerge.errors import RecipeError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("1000000", 1_000_000),
        ("1b", 1),
        ("2k", 2000),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("1.5GB", 1_500_000_000),
        ("800 MiB", 800 * 2**20),
        ("  4 gb ", 4_000_000_000),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        (".5k", 500),
        ("1.9", 1),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "GB", "4 apples", "4GBs", "-1", "-4GB", "1e9", "0", "0.5", "1.2.3", "..", "nan", "inf",
     "4 G B", "9" * 40, "5000000TiB", "1PB"],
)  # fmt: skip
def test_what_is_no_size(text: str) -> None:
    expected = re.escape(f"'{text}' is not a size; write it as 500MB, 4GB or 2GiB")
    with pytest.raises(RecipeError, match=f"^{expected}$"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (999_999, "1 MB"),
        (1_500_000_000, "1.5 GB"),
        (999_999_999_999, "1 TB"),
        (2.5e12, "2.5 TB"),
        (-1500, "-1.5 kB"),
    ],
)
def test_what_people_read(num_bytes: float, expected: str) -> None:
    assert format_bytes(num_bytes) == expected


@given(st.integers(1, 10**14))
def test_what_is_shown_is_near_what_is_meant(num_bytes: int) -> None:
    shown = format_bytes(num_bytes)
    assert "e" not in shown
    assert parse_bytes(shown) == pytest.approx(num_bytes, rel=0.006)
