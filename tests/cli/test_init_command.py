"""`mats init`: a recipe from options, or from answers."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import matsmerge
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
    for name in ("one.jsonl", "two.jsonl"):
        (here / name).write_text("")
    typed = "one\n./lost\ntwo\n\nbase-model\ny\nnone.jsonl\n\none.jsonl\ntwo.jsonl\n"
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    code, out, err = mats("init", "-o", "r.yaml")
    assert code == 0, err
    assert "  base-model is no file or folder here: it is taken for an id on the hub\n" in out
    assert "  ./lost is no file or folder here, nor can it be an id on the hub\n" in out
    assert "  none.jsonl is no file or folder here, nor can it be" in out
    assert "  there has to be one for each model\n" in out
    recipe, _ = read_recipe(here / "r.yaml")
    assert recipe.method.name == "mats_cross"
    assert [(e.name, e.data and e.data.data) for e in recipe.models] == [
        ("one", "one.jsonl"), ("two", "two.jsonl"),
    ]  # fmt: skip
    assert recipe.base == "base-model"


def test_models_that_are_here_are_taken_as_they_are(
    mats: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (here / name).mkdir()
    monkeypatch.setattr("sys.stdin", Terminal("a\nfilm=b\ns3://bucket/d\n\nc\nn\n"))
    code, out, err = mats("init")
    assert code == 0, err
    assert "no file or folder" not in out
    recipe, _ = read_recipe(here / "recipe.yaml")
    assert [entry.name for entry in recipe.models] == ["a", "film", "d"]
    assert recipe.method.name == "task_arithmetic"


@pytest.mark.parametrize(("kind", "method"), [("kfac", "mats_kfac"), ("gram", "task_arithmetic")])
def test_statistics_beside_the_models_are_seen(
    mats: Run, here: Path, kind: str, method: str
) -> None:
    for name in ("a", "b"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        batches = [{"input": torch.ones(3, 2)}]
        (here / name).mkdir()
        matsmerge.collect(
            model,
            batches,
            kind,
            loss=lambda model, batch: model(batch["input"]).sum(1),
            out=here / name / "statistics.safetensors",
        )
    assert mats("init", "a", "b", "--base", "c")[0] == 0
    assert read_recipe(here / "recipe.yaml")[0].method.name == method


def test_questions_do_not_wait_for_torch(here: Path) -> None:
    code = (
        "import sys; from matsmerge.cli import init_command as c\n"
        "class Asked(Exception): pass\n"
        "def ask(given): print('torch' in sys.modules); raise Asked\n"
        "c._ask = ask\n"
        "from matsmerge.cli.commands import call\n"
        "try: call(['init'])\n"
        "except Asked: pass"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n", result.stderr


def test_problems(mats: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "no models: give those to merge" in mats("init")[2]
    monkeypatch.setattr("sys.stdin", Terminal("\n\n"))
    assert "a recipe needs at least one" in mats("init")[2]
    assert "1 times --data for 2 models" in mats("init", "a", "b", "--data", "x")[2]
    assert "unknown method 'tie'" in mats("init", "a", "b", "--method", "tie")[2]
    assert not (here / "recipe.yaml").exists()
