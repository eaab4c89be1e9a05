"""What people publish holds names and digests, and no local paths."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import bert_config, make_tokenizer, save, write_rows
from transformers import BertForSequenceClassification

from matsmerge.checkpoints.public_names import public_name, public_text, without_paths
from matsmerge.engine.private_paths import PRIVATE, read_paths

Run = Callable[..., tuple[int, str, str]]
SECRET = "where-nobody-looks"


@pytest.fixture
def place(tmp_path: Path, mats: Run) -> Path:
    """Two models, their base, statistics and tasks, in a folder with a name of its own."""
    place = tmp_path / SECRET / "deeper"
    base = BertForSequenceClassification(bert_config(num_labels=3))
    save(base, place / "base", make_tokenizer())
    for i, name in enumerate(("one", "two")):
        model = BertForSequenceClassification.from_pretrained(place / "base")
        save(model, place / name, make_tokenizer(), seed=i + 1)
        rows = [{"text": " ".join("abcdefg"[(i + j) % 5 :]), "label": j % 3} for j in range(12)]
        write_rows(place / f"{name}.jsonl", rows)
        (place / f"{name}.yaml").write_text(
            f"data: {{test: {name}.jsonl, validation: {name}.jsonl}}\n"
        )
        collected = place / f"{name}.statistics.safetensors"
        code, _, err = mats(
            "collect", place / name, "--data", place / f"{name}.jsonl", "-o", collected, "-q"
        )
        assert code == 0, err
    return place


def merge(mats: Run, place: Path, out: Path, *options: Any) -> None:
    code, _, err = mats(
        "merge", "--method", "mats", "--base", place / "base",
        "--model", place / "one", "--model", place / "two",
        "--statistics", place / "one.statistics.safetensors",
        "--statistics", place / "two.statistics.safetensors",
        "--iterations", 2, "--heads", "classifier.*", "-o", out, *options,
    )  # fmt: skip
    assert code == 0, err


def revealing(*folders: Path, besides: tuple[str, ...] = (PRIVATE,)) -> list[str]:
    files = [f for folder in folders for f in ([folder] if folder.is_file() else folder.rglob("*"))]
    assert files
    return [
        f.name
        for f in files
        if f.is_file() and f.name not in besides and SECRET.encode() in f.read_bytes()
    ]


@pytest.mark.parametrize("relative", [False, True])
def test_a_merge_its_scores_and_its_report(
    mats: Run, place: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    if relative:
        monkeypatch.chdir(place.parent.parent)
        place = Path(SECRET) / "deeper"
    merge(mats, place, place / "merged", "--trace", place / "trace.jsonl")
    merge(mats, place, place / "steps", "--trajectory", "1,2")
    code, _, err = mats(
        "evaluate", place / "merged", place / "one", "--individual", f"two={place / 'two'}",
        "--task", place / "one.yaml", "--task", place / "two.yaml", "-o", place / "scores",
    )  # fmt: skip
    assert code == 0, err
    code, _, err = mats(
        "report", place / "merged", "--scores", place / "scores", "-o", place / "page.html",
        "--markdown", place / "page.md", "--subspaces",
    )  # fmt: skip
    assert code == 0, err
    published = [place / name for name in ("merged", "steps", "scores", "trace.jsonl", "page.html")]
    assert revealing(*published, place / "page.md") == []
    manifest = json.loads((place / "merged" / "merge.json").read_text())
    assert [i.get("source") for i in manifest["inputs"]] == ["one", "two", "base", None, None]
    page = (place / "page.md").read_text()
    assert "## Subspaces" in page  # models and statistics were found all the same
    assert "How far the merge is from each model" in page
    # What is for us alone is kept from git and the hub.
    assert (place / "merged" / ".gitignore").read_text() == f"{PRIVATE}\n"
    assert read_paths(place / "merged").base == str((place / "base").absolute())
    code, out, err = mats("inspect", place / "merged", "--subspace", "--json")
    assert code == 0, err
    assert [task["name"] for task in json.loads(out)["tasks"]] == ["one", "two"]


def test_without_the_private_file_it_is_said_what_is_missing(mats: Run, place: Path) -> None:
    merge(mats, place, place / "merged")
    (place / "merged" / PRIVATE).unlink()
    code, _, err = mats("inspect", place / "merged", "--subspace")
    assert code == 1
    assert "merge.json names it, say with --model where it is now" in err
    code, _, err = mats("report", place / "merged", "-o", place / "page.html")
    assert code == 0, err
    (place / "merged" / PRIVATE).write_text('{"models": 5}')
    code, _, err = mats("inspect", place / "merged", "--subspace")
    assert code == 1
    assert f"{place / 'merged' / PRIVATE}: models: " in err


def test_the_private_file_does_not_travel(mats: Run, place: Path) -> None:
    merge(mats, place, place / "merged")
    code, _, err = mats("merge", "--model", place / "merged", "-o", place / "again")
    assert code == 0, err
    assert read_paths(place / "again").models == {"merged": str(place / "merged")}


def test_what_was_tuned(mats: Run, place: Path) -> None:
    (place / "recipe.yaml").write_text(
        f"base: {place / 'base'}\nmodels: [{place / 'one'}, {place / 'two'}]\n"
        "method: task_arithmetic\nheads: classifier.*\n"
    )
    code, _, err = mats(
        "tune", place / "recipe.yaml", "--task", place / "one.yaml", "--search", "scale=0.1,0.2",
        "-o", place / "tuned", "--allow-overlap",
    )  # fmt: skip
    assert code == 0, err
    code, _, err = mats("report", place / "tuned", "-o", place / "page.html")
    assert code == 0, err
    # The chosen recipe is there to be run again, on this machine.
    assert revealing(place / "tuned", place / "page.html", besides=(PRIVATE, "recipe.yaml")) == []


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    names = {
        "runs/a": "a", "./runs/a": "a", "/gone/b": "b", "~/models/c": "c", "../d": "d", "a": "a",
        "owner/name": "owner/name", "owner/name@main": "owner/name@main", "": "", "*.w": "*.w",
    }  # fmt: skip
    for source, name in names.items():
        assert public_name(source) == name
    recipe = {"models": [{"model": "runs/a", "weight": 2.0}], "heads": ["classifier.*"]}
    assert without_paths(recipe) == {
        "models": [{"model": "a", "weight": 2.0}],
        "heads": ["classifier.*"],
    }
    said = "on the base runs/a; the adapters name /home/me/base, owner/base"
    assert public_text(said, ["runs/a"]) == "on the base a; the adapters name base, owner/base"
