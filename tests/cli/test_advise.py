"""`mats advise`: what it prints, what it writes, and that the next command can be typed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from advised_models import Family, make_family

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), poor=[2], fresh=True)


def test_the_recipe_can_be_merged(mats: Run, family: Family, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    code, out, err = mats("advise", *family.flags, *family.data_flags, "--out", file)
    assert code == 0, err
    for line in (
        "! m2 is a poor model",
        "! bert.pooler.dense was learnt from scratch",
        "+ The tokenizers do not differ.",
        "Merge them by mats_cross",
        f"next: mats merge {file} --out merged",
    ):
        assert line in out
    assert file.read_text().strip() in out
    code, out, err = mats("merge", file, "--dry-run")
    assert code == 0, err
    assert "m0, m1, m2" in out
    code, _, err = mats("advise", *family.flags, "--out", file)
    assert code == 1
    assert "exists already" in err
    code, _, err = mats("advise", *family.flags, "--out", file, "--overwrite", "-q")
    assert code == 0, err
    assert "actmat" in file.read_text()


def test_data_in_splits(mats: Run, family: Family, tmp_path: Path) -> None:
    flags: list[object] = []
    for path in family.data:
        task = tmp_path / f"{path.stem}.yaml"
        text = f"task: sequence_classification\ndata: {path}\nsplits: {{train: 0.5, test: 0.5}}\n"
        task.write_text(text)
        flags += ["--data", task]
    code, _, err = mats("advise", *family.flags, *flags)
    assert code == 1
    assert "has the splits train, test; say which one to use (--split" in err
    file = tmp_path / "recipe.yaml"
    code, out, err = mats("advise", *family.flags, *flags, "--split", "train", "--out", file)
    assert code == 0, err
    assert out.count("split: train") == 3
    code, _, err = mats("merge", file, "--dry-run")
    assert code == 0, err


def test_without_a_file_it_says_to_make_one(mats: Run, family: Family) -> None:
    code, out, _ = mats("advise", *family.flags)
    assert code == 0
    assert "next: save this as recipe.yaml, then mats merge recipe.yaml --out merged" in out
    assert "sure" not in out.splitlines()[0]  # nothing was run
    assert "cosines of task vectors" in out


def test_json(mats: Run, family: Family) -> None:
    code, out, _ = mats("advise", *family.flags, "--json")
    assert code == 0
    content = json.loads(out)
    assert content["recipe"]["method"] == {"name": "actmat"}
    assert content["next"] == "mats merge recipe.yaml --out merged"
    assert {f["level"] for f in content["findings"]} == {"good", "note", "warning"}
    assert content["models"]["m0"]["answers"] is None
    assert len(content["cosines"]) == 3


def test_what_is_wrong(mats: Run, family: Family, tmp_path: Path) -> None:
    code, _, err = mats("advise", *family.models)
    assert code == 1
    assert "--base" in err
    code, _, err = mats("advise", *family.flags, "--out", tmp_path / "recipe.txt")
    assert code == 1
    assert ".yaml" in err
    code, _, err = mats("advise", *family.flags, "--data", family.data[0])
    assert code == 1
    assert "1 data for 3 models" in err
