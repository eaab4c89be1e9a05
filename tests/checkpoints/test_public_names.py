"""Names to publish: hub ids as they are, the last part of paths."""

from pathlib import Path

import pytest

from matsmerge.checkpoints.public_names import public_name, public_text, split_name


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eos_token differs: '</s>' in a, '<eos>' in b", "eos_token differs: '</s>' in a, '<eos>' in b"),
        ("see https://huggingface.co/owner/name", "see https://huggingface.co/owner/name"),
        ("50%/50% and/or", "50%/50% and/or"),
        ("/home/me/models/a: has none", "a: has none"),
        ("'../private/b' and (~/c/d)", "'b' and (d)"),
    ],
)  # fmt: skip
def test_only_paths_are_shortened(text: str, expected: str) -> None:
    assert public_text(text) == expected


def test_names_in_front_of_sources(tmp_path: Path) -> None:
    assert split_name("film=tuned/imdb") == ("film", "tuned/imdb")
    assert split_name("owner/name@rev") == (None, "owner/name@rev")
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    assert split_name(str(folder)) == (None, str(folder))
