"""Requests that fail are made again, a few times."""

import sys
from pathlib import Path
from typing import Any

import pytest
from faulty_store import FaultyStore, failing

from matsmerge.errors import DataError
from matsmerge.files.remote_names import LIBRARIES
from matsmerge.files.remote_store import RemoteState, delete, look, put, read_range

URL = "memory://bucket/file"


@pytest.fixture
def content(store: FaultyStore) -> bytes:
    found = bytes(range(256)) * 4
    store.put("/bucket/file", found)
    return found


@pytest.mark.parametrize(
    "error",
    [OSError("500"), ConnectionResetError("reset"), TimeoutError(), RuntimeError("SlowDown")],
)
def test_two_failures_are_forgiven(content: bytes, error: Exception) -> None:
    FaultyStore.fault = failing(2, error)
    assert read_range(URL, len(content), 10, 20) == content[10:20]
    assert FaultyStore.requests["read"] == 3


def test_the_third_is_one_error_with_the_range(content: bytes) -> None:
    FaultyStore.fault = failing(3, OSError("503 https://host/x?X-Amz-Signature=secret now"))
    with pytest.raises(
        OSError, match="bytes 10 to 20: 3 attempts failed, the last with 503"
    ) as error:
        read_range(URL, len(content), 10, 20)
    assert "secret" not in str(error.value)


def test_a_short_answer_is_no_answer(content: bytes) -> None:
    FaultyStore.fault = lambda operation, _: content[:3] if operation == "read" else None
    with pytest.raises(
        OSError, match="bytes 0 to 9: 3 attempts failed, the last with 3 bytes came"
    ):
        read_range(URL, len(content), 0, 9)


def test_a_server_that_ignores_ranges(content: bytes) -> None:
    FaultyStore.fault = lambda operation, _: content if operation == "read" else None
    with pytest.raises(OSError, match="sends whole files only"):
        read_range(URL, len(content), 0, 9)
    assert FaultyStore.requests["read"] == 1
    assert read_range(URL, len(content), 0, len(content)) == content


@pytest.mark.parametrize(
    ("error", "words"), [(FileNotFoundError("x"), "not there"), (PermissionError("x"), "denied")]
)
def test_what_another_attempt_would_not_change(
    content: bytes, error: Exception, words: str
) -> None:
    FaultyStore.fault = failing(1, error)
    with pytest.raises(type(error), match=words):
        read_range(URL, len(content), 0, 9)
    assert FaultyStore.requests["read"] == 1


def test_nothing_is_read_without_a_request(content: bytes) -> None:
    assert read_range(URL, len(content), 5, 5) == b""
    assert not FaultyStore.requests


def test_looking(store: FaultyStore, content: bytes) -> None:
    store.put("/bucket/sub/deep/er", b"xy")
    found = look(URL)
    assert isinstance(found, RemoteState)
    assert found.size == len(content)
    listed = look("memory://bucket")
    assert isinstance(listed, dict)
    assert {name: state.size for name, state in listed.items()} == {"file": 1024, "sub/deep/er": 2}
    assert look("memory://bucket", 1) == {"file": found}
    assert look("memory://nowhere") is None
    store.put("/bucket/file", content[::-1])
    assert look(URL) != found


def test_putting(store: FaultyStore, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello")
    FaultyStore.fault = failing(1, OSError("500"), "put")
    assert put(tmp_path / "x", "memory://bucket/x").size == 5
    assert store.cat_file("/bucket/x") == b"hello"
    delete("memory://bucket/x")
    assert look("memory://bucket/x") is None


def test_what_arrives_only_in_part(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(self: Any, lpath: str, rpath: str, *_: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes()[:2])

    (tmp_path / "x").write_bytes(b"hello")
    monkeypatch.setattr(FaultyStore, "put_file", cut)
    with pytest.raises(
        OSError, match="memory://bucket/x: 3 attempts failed, the last with 2 of 5 bytes"
    ):
        put(tmp_path / "x", "memory://bucket/x")


@pytest.mark.parametrize(
    ("scheme", "extra"), [("s3", "remote"), ("gs", "gs"), ("az", "az"), ("https", "remote")]
)
def test_the_extra_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch, scheme: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, LIBRARIES[scheme], None)
    with pytest.raises(DataError, match=rf"pip install 'matsmerge\[{extra}\]'"):
        look(f"{scheme}://bucket/file")
