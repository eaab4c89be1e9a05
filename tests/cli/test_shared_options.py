"""Options that several commands have."""

import sys
from collections.abc import Callable
from pathlib import Path

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


@pytest.mark.parametrize(
    "command",
    [
        ("merge", "--model", "a", "--model", "b", "--out", "out"),
        ("collect", "a", "--data", "a.jsonl", "--out", "out.safetensors"),
        ("tune", "recipe.yaml", "--out", "out"),
        ("experiment", "run", "demo", "--out", "out"),
        ("demo", "--out", "out"),
    ],
    ids=lambda command: command[0],
)
def test_ray(
    command: tuple[str, ...],
    mats: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Where it is not installed, that is said before inputs are looked at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, error = mats(*command, "--executor", "ray")
    assert code == 1
    assert "install it with `pip install 'matsmerge[ray]'`" in error
    code, _, error = mats(*command, "--ray-address", "somewhere:6379")
    assert (code, "--ray-address: is for --executor ray alone" in error) == (1, True)
    code, _, error = mats(*command, "--executor", "rya")
    assert code == 1
    assert all(word in error for word in ("rya", "local", "ray")), error
    assert not list(tmp_path.iterdir())
