"""Rows of text files at their edges: blank lines, line ends, columns, and files that are cut."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from matsmerge.data.rows import read_data
from matsmerge.errors import DataError

VALUES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12)
# A row without columns is none; hypothesis is not to think of too many.
ROWS = st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, min_size=1), min_size=1, max_size=4)
within = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)


def rows_of(path: Path) -> list[Mapping[str, Any]]:
    return list(read_data(path).rows)


@within
@given(rows=ROWS, end=st.sampled_from(["\n", "\r\n", "\n\n \n"]))
def test_lines_of_json_are_what_was_written(
    tmp_path: Path, rows: list[dict[str, Any]], end: str
) -> None:
    """Also where texts hold line separators that are none in JSON."""
    text = "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)
    (tmp_path / "d.jsonl").write_bytes(text.encode())
    (tmp_path / "d.json").write_bytes(f" \n{json.dumps(rows)}".encode())
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("d.jsonl", "d.json", "d.jsonl.gz"):
        found = rows_of(tmp_path / name)
        assert [
            {k: row.get(k) for k in given} for row, given in zip(found, rows, strict=True)
        ] == rows


@within
@given(
    cells=st.lists(
        st.tuples(
            *[st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=8)] * 2
        ),
        min_size=1,
        max_size=4,
    )
)
def test_cells_are_text(tmp_path: Path, cells: list[tuple[str, str]]) -> None:
    def quoted(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    lines = ['"x","y"', *(f"{quoted(x)},{quoted(y)}" for x, y in cells)]
    (tmp_path / "d.csv").write_bytes("\n".join(lines).encode())
    assert [(row["x"], row["y"]) for row in rows_of(tmp_path / "d.csv")] == cells


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.csv", "a,a\n1,2\n", "line 1: expected a header with a different name for each column"),
        ("d.csv", "a,\n1,2\n", "line 1: expected a header with a different name"),
        ("d.csv", "a,b\n1\n1,2,3\n", "line 2: expected 2 fields as in the header, found 1"),
        ("d.csv", "a,b\n1\n1,2,3\n", "line 3: expected 2 fields as in the header, found 3"),
        ("d.tsv", "a\tb\n1,2\n", "line 2: expected 2 fields as in the header, found 1"),
        ("d.csv", 'a,b\n"1,2\n', "line "),
        ("d.json", "[1, {}]", "item 1: expected an object, found"),
        ("d.json", "[" * 50_000, "damaged JSON"),
        ("d.json", "[{]", "damaged JSON"),
        ("d.jsonl", "{\n", r"line 1: .*damaged JSON \(.*\): {"),
        ("d.jsonl", "{}\n3\n", "line 2: expected an object, found"),
        ("d.jsonl", '{"a": 1}{"a": 2}\n', "line 1: expected one JSON object per line"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"(?s){name}: .*{message}|{name}: {message}"):
        rows_of(tmp_path / name)


def test_columns_beyond_number(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text(",".join(f"c{i}" for i in range(10_001)) + "\n")
    with pytest.raises(DataError, match="line 1: has 10,001 columns, at most 10,000 do"):
        rows_of(tmp_path / "d.csv")


@pytest.mark.parametrize("cut", [1, 8, 12, 30])
def test_a_compressed_file_that_is_cut_short(tmp_path: Path, cut: int) -> None:
    """A copy that broke off."""
    whole = gzip.compress(b"".join(b'{"a": %d}\n' % i for i in range(1000)))
    (tmp_path / "d.jsonl.gz").write_bytes(whole[:-cut])
    with pytest.raises(
        DataError, match="d.jsonl.gz: (is cut short; copy or download it again|not a valid)"
    ):
        rows_of(tmp_path / "d.jsonl.gz")


@pytest.mark.parametrize(
    "content", [b"plain text", b"\x1f\x8b" + bytes(30), b"\x1f\x8b\x08" + b"\xff" * 40]
)
def test_what_is_not_compressed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match="d.jsonl.gz: (is cut short|not a valid gzip file)"):
        rows_of(tmp_path / "d.jsonl.gz")
