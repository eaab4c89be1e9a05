import math
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ConfigDict, Field

from matsmerge.errors import CheckpointError, DataError
from matsmerge.files.guarded_files import (
    Content,
    parse_as,
    parse_json,
    read_bytes,
    read_json,
    read_json_as,
    read_text,
)


def test_only_regular_files(tmp_path: Path) -> None:
    pipe, link, dangling = tmp_path / "pipe", tmp_path / "link", tmp_path / "dangling"
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    dangling.symlink_to(tmp_path / "nothing")
    for path, message in (
        (pipe, "not a regular file"),
        (link, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path, "not a regular file"),
        (dangling, r"cannot be read \(No such file or directory\)"),
        (tmp_path / "none", r"cannot be read \(No such file or directory\)"),
        (tmp_path / "a\0b", "cannot be read"),
        (tmp_path / ("x" * 300), r"cannot be read \(File name too long\)"),
    ):
        with pytest.raises(DataError, match=message):
            read_bytes(path, DataError)


def test_sizes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, DataError, 5) == b"12345"
    with pytest.raises(DataError, match="file: larger than the 4 bytes that such a file may have"):
        read_bytes(path, DataError, 4)
    with path.open("wb") as file:
        file.truncate(2**40)  # a terabyte that takes no room
    with pytest.raises(DataError, match="larger than"):
        read_bytes(path, DataError)


def test_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbfgr\xc3\xbcn")
    assert read_text(path, DataError) == "grün"
    for content, place in ((b"gr\xfcn", "0xfc at position 2"), (b"\xff\xfea\0", "0xff")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"file: not UTF-8 text \(byte {place}"):
            read_text(path, DataError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ('{"a": 1', "not valid JSON"),
        ("\0", "not valid JSON"),
        ("[" * 100_000, r"not valid JSON \(nested too deeply\)"),
        ('{"a":' * 100_000, r"not valid JSON \(nested too deeply\)"),
        (r'{"a": ["\ud800"]}', r"not valid JSON \(half a character, '\\ud800'\)"),
        (r'{"\uDfff": 1}', "not valid JSON"),
        ("9" * 5000, "not valid JSON"),
        ("[" + "1," * 3_000_000 + "1]", "more than 2,000,000 values in JSON"),
    ],
)
def test_json(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"where: {message}"):
        parse_json(text, "where", DataError)
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_json(path, CheckpointError)


def test_characters_of_two_halves() -> None:
    assert parse_json(r'"\ud83d\ude00"', "where", DataError) == "😀"


class Example(Content):
    number: int
    share: float = 0.5
    names: list[str] = Field(default_factory=list)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the whole: "),
        (5, "the whole: "),
        ([], "the whole: input should be a valid dictionary, found a list"),
        ({}, "number: is missing"),
        ({"number": None}, "number: input should be a valid integer, found None"),
        ({"number": "5"}, "number: input should be a valid integer, found '5'"),
        ({"number": True}, "number: input should be a valid integer, found True"),
        ({"number": 1.0}, "number: input should be a valid integer, found 1.0"),
        ({"number": 1, "share": math.nan}, "share: input should be a finite number, found nan"),
        ({"number": 1, "share": math.inf}, "share: input should be a finite number, found inf"),
        ({"number": 1, "names": "abc"}, "names: input should be a valid list, found 'abc'"),
        ({"number": 1, "names": ["a", 1]}, "names.1: input should be a valid string, found 1"),
        ({"number": "x" * 5000}, "x…$"),
    ],
)
def test_wrong_types(content: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"file.json: {message}" if ":" in message else message):
        parse_as(content, Example, "file.json", DataError)


def test_all_that_is_wrong(tmp_path: Path) -> None:
    class Pair(Content):
        model_config = ConfigDict(extra="forbid")

        values: list[int]

    with pytest.raises(DataError) as caught:
        parse_as({"values": ["a"] * 1000, "other": 1}, Pair, "file.json", DataError)
    assert len(caught.value.problems) == 6
    assert caught.value.problems[-1] == "and 996 more"
    path = tmp_path / "file.json"
    path.write_text('{"number": 3, "unknown": [1]}')
    assert read_json_as(path, Example, DataError) == Example(number=3)
