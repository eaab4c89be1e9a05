"""Journals by themselves: what is written is read, a torn end is forgotten, damage is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from matsmerge.errors import OutputError
from matsmerge.files import journal_file
from matsmerge.files.journal_file import JournalFile, line_of, read_journal_lines

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ENTRIES = st.dictionaries(st.text(max_size=6).filter(lambda k: k != "check"), VALUES, min_size=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def write(path: Path, *entries: dict[str, Any]) -> JournalFile:
    journal = JournalFile.begin(path, entries[0])
    for entry in entries[1:]:
        journal.note(entry)
    return journal


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(entries=st.lists(ENTRIES, min_size=1, max_size=4))
def test_what_is_noted_is_read(path: Path, entries: list[dict[str, Any]]) -> None:
    write(path, *entries)
    assert read_journal_lines(path) == (entries, path.stat().st_size)


def test_no_journal_is_empty(path: Path) -> None:
    assert read_journal_lines(path) == ([], 0)
    path.write_bytes(b"")
    assert read_journal_lines(path) == ([], 0)


def test_beginning_forgets_what_was_there(path: Path) -> None:
    write(path, {"a": 1}, {"b": 2})
    write(path, {"c": 3})
    assert read_journal_lines(path)[0] == [{"c": 3}]


def test_every_cut_leaves_whole_lines(path: Path) -> None:
    """A run that dies while it writes tears the last line, wherever."""
    entries: list[dict[str, Any]] = [{"first": 1}, {"x": "ä\n"}, {"last": [1.5, None]}]
    write(path, *entries)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        num = sum(end <= length for end in ends)
        assert read_journal_lines(path) == (entries[:num], ends[num - 1] if num else 0)


def test_going_on_after_a_torn_line(path: Path) -> None:
    write(path, {"a": 1}, {"b": 2})
    path.write_bytes(path.read_bytes()[:-3])
    entries, num_bytes = read_journal_lines(path)
    assert entries == [{"a": 1}]
    JournalFile.resume(path, num_bytes).note({"c": 3})
    assert read_journal_lines(path)[0] == [{"a": 1}, {"c": 3}]


@pytest.mark.parametrize("noise", [b"\0\0\0\n", b"{\n", b"\xff\xfe\n"])
def test_a_last_line_of_noise_is_torn_too(path: Path, noise: bytes) -> None:
    """A file system may have made room for what never arrived."""
    write(path, {"a": 1})
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(noise)
    assert read_journal_lines(path) == ([{"a": 1}], size)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda lines: [b"{\n", *lines[1:]], "line 1: .*no JSON in UTF-8"),
        (lambda lines: [lines[0], b"\xff\n", lines[2]], "line 2: .*no JSON in UTF-8"),
        (lambda lines: [lines[0], b"[]\n", lines[2]], "line 2: .*expected a mapping"),
        (lambda lines: [*lines, b"3\n"], "line 4: .*expected a mapping"),
        (lambda lines: [lines[0], b'{"b": 2}\n', lines[2]], "line 2: .*checksum does not fit"),
        (lambda lines: [lines[0].replace(b"1", b"7", 1), *lines[1:]], "line 1: .*checksum"),
        (lambda lines: [*lines[:2], lines[2].replace(b"c", b"d", 1)], "line 3: .*checksum"),
        (lambda lines: [b"{\n"], "line 1: .*no JSON"),  # the first line is not torn: it is none
    ],
)
def test_damage_is_refused(path: Path, damage: Any, reason: str) -> None:
    write(path, {"a": 1}, {"b": 2}, {"c": 3})
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(damage(lines)))
    with pytest.raises(OutputError, match=f"{path}: {reason}"):
        read_journal_lines(path)


def test_a_message_says_what_to_do(path: Path) -> None:
    assert line_of(path, 3) == f"{path}: line 3: damaged, start anew with --overwrite"


def test_more_than_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, {"a": "x" * 100})
    monkeypatch.setattr(journal_file, "_MAX_BYTES", 50)
    with pytest.raises(OutputError, match=r"journal\.jsonl: .*50"):
        read_journal_lines(path)


def test_checks_are_not_part_of_the_content(path: Path) -> None:
    entry = {"a": {"check": 5}}
    write(path, entry)
    assert json.loads(path.read_text())["check"] != 5
    assert read_journal_lines(path)[0] == [entry]
