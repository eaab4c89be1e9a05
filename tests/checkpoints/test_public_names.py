"""Names to publish: hub ids as they are, the last part of paths."""

from pathlib import Path

import pytest

from matsmerge.checkpoints.public_names import public_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/name", "owner/name"),
        ("owner/name:config@v1 (train)", "owner/name:config@v1 (train)"),
        ("{here}/d (copy).jsonl", "d (copy).jsonl"),
        ("{here}/d (copy).jsonl (train)", "d (copy).jsonl (train)"),
        ("{here}/gone.jsonl", "gone.jsonl"),
        ("/home/somebody/gone.jsonl (test)", "gone.jsonl (test)"),
        ("../somewhere/gone", "gone"),
        ("batches", "batches"),
        ("x" * 1000, "x" * 1000),
        ("a\0b", "a\0b"),
    ],
)
def test_public_names(name: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "d (copy).jsonl").touch()
    assert public_name(name.format(here=tmp_path)) == expected
