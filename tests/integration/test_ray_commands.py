"""Commands on a Ray cluster: the same files as here."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray_clusters import cluster
from tiny_models import bert_config, make_tokenizer, save, write_rows
from tiny_suite import make_base, make_data, tiny_suite
from transformers import BertForSequenceClassification

from matsmerge import RayExecutor
from matsmerge.lab.experiments.suite_run import run_suite

pytest.importorskip("ray", reason="needs the extra matsmerge[ray]")

Run = Callable[..., tuple[int, str, str]]
NAMES = ("one", "two")


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[Any]:
    with cluster(2) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models with data; commands run here, with relative paths."""
    monkeypatch.chdir(tmp_path)
    words = [" ".join("abcdefgh"[(i * k) % 8] for k in (1, 3, 5)) for i in range(40)]
    for seed, name in enumerate(NAMES):
        save(
            BertForSequenceClassification(bert_config(num_labels=2)),
            tmp_path / name,
            make_tokenizer(),
            seed=seed,
        )
        rows = [{"text": text, "label": (i + seed) % 2} for i, text in enumerate(words)]
        write_rows(tmp_path / f"{name}.jsonl", rows)
        (tmp_path / f"{name}.yaml").write_text(
            f"data: {name}.jsonl\nsplits: {{train: 20, validation: 20}}\n"
        )
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    found = (p for p in folder.rglob("*") if p.is_file() and p.name != "trials.jsonl")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.long
def test_collecting_and_tuning(place: Path, mats: Run) -> None:
    for where, more in (("here", ()), ("there", ("--executor", "ray"))):
        outs = [Path(where) / f"{name}.safetensors" for name in NAMES]
        code, said, error = mats(
            *("collect", *NAMES, "--task", "one.yaml", "--task", "two.yaml", "--split", "train"),
            *("--statistics", "kfac", "--out", outs[0], "--out", outs[1], "--json", *more),
        )
        assert code == 0, error
        assert [one["out"] for one in json.loads(said)] == [str(out) for out in outs]
    assert files(place / "here") == files(place / "there")
    recipe = {
        "models": [{"model": n, "statistics": f"here/{n}.safetensors"} for n in NAMES],
        "method": {"name": "mats", "init": "average", "objective": {"name": "kfac"}},
        "heads": "classifier.*",
    }
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for where, more in (("tuned/here", ()), ("tuned/there", ("--executor", "ray"))):
        for unlabelled in ((), ("--unlabelled",)):
            out = Path(where) / f"{len(unlabelled)}" / "out"
            code, _, error = mats(
                *("tune", "recipe.yaml", "--task", "one.yaml", "--task", "two.yaml", "-q"),
                *("--search", "iterations=1,3"),
                *("--out", out, *unlabelled, *more),
            )
            assert code == 0, error
    assert files(place / "tuned" / "here") == files(place / "tuned" / "there")


@pytest.mark.long
def test_parts_of_the_data(place: Path, mats: Run) -> None:
    """The statistics of one model by several tasks are those of several processes."""
    arguments = ["collect", "one", "--task", "one.yaml", "--split", "train", "--batch-size", "3"]
    code, _, error = mats(*arguments, "--executor", "ray", "--parts", "2", "--out", "r.safetensors")
    assert code == 0, error
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, "-m", "matsmerge", *arguments, "--out", "p.safetensors"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (place / "r.safetensors").read_bytes() == (place / "p.safetensors").read_bytes()
    assert not list(place.glob(".*"))


@pytest.mark.long
def test_steps_of_a_suite(tmp_path: Path) -> None:
    base, data = make_base(tmp_path / "base"), make_data(tmp_path / "data")
    run = partial(run_suite, tiny_suite(), base=base, data=data)
    here = run(folder=tmp_path / "here", num_workers=1)
    there = run(folder=tmp_path / "there", starter=RayExecutor())
    assert not there.missing
    assert there.variants == here.variants
