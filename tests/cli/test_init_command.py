"""`mats init`: a recipe from options, or from answers."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from matsmerge.recipes.recipe_file import read_recipe

Run = Callable[..., tuple[int, str, str]]


class Terminal(io.StringIO):
    """Somebody who types these lines."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_options(mats: Run, here: Path) -> None:
    code, out, err = mats(
        "init", "tuned/a", "film=tuned/b", "--base", "c", "--method", "ties", "--heads", "head.*"
    )
    assert code == 0, err
    assert "next: mats merge recipe.yaml --out merged  # with --dry-run" in out
    assert yaml.safe_load((here / "recipe.yaml").read_text()) == {
        "base": "c",
        "models": [{"model": "tuned/a", "name": "a"}, {"model": "tuned/b", "name": "film"}],
        "method": {"name": "ties"},
        "heads": ["head.*"],
    }
    assert "--overwrite" in mats("init", "x", "y")[2]
    assert mats("init", "x", "y", "--overwrite")[0] == 0
    assert read_recipe(here / "recipe.yaml")[0].method.name == "average"


def test_questions(mats: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("one\ntwo\n\nbase-model\ny\none.jsonl\ntwo.jsonl\n"))
    code, _, err = mats("init", "-o", "r.yaml")
    assert code == 0, err
    recipe, _ = read_recipe(here / "r.yaml")
    assert recipe.method.name == "mats_cross"
    assert [(e.name, e.data and e.data.data) for e in recipe.models] == [
        ("one", "one.jsonl"), ("two", "two.jsonl"),
    ]  # fmt: skip
    assert recipe.base == "base-model"


def test_problems(mats: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "no models: give those to merge" in mats("init")[2]
    monkeypatch.setattr("sys.stdin", Terminal("\n\n"))
    assert "a recipe needs at least one" in mats("init")[2]
    assert "1 times --data for 2 models" in mats("init", "a", "b", "--data", "x")[2]
    assert "unknown method 'tie'" in mats("init", "a", "b", "--method", "tie")[2]
    assert not (here / "recipe.yaml").exists()
