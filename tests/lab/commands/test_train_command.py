"""`mats train`: what it shows, and that what it makes can be merged."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import bert_config, make_tokenizer, save, write_rows
from transformers import BertModel

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(BertModel(bert_config()), tmp_path / "base", make_tokenizer())


def task(folder: Path, name: str, num_classes: int = 2, names: bool = False) -> Path:
    drawn = random.Random(name)
    rows = []
    for i in range(100):
        letters = "abcdefgh"[i % num_classes :: num_classes]
        text = " ".join(drawn.choices(letters, k=drawn.randint(2, 6)))
        rows.append({"text": text, "label": "xyz"[i % num_classes] if names else i % num_classes})
    write_rows(folder / f"{name}.jsonl", rows)
    path = folder / f"{name}.yaml"
    path.write_text(
        f"task: sequence_classification\ndata: {name}.jsonl\n"
        "splits: {train: 0.7, validation: 0.2, test: 0.1}\n"
    )
    return path


def test_what_is_shown(mats: Run, bert: Path, tmp_path: Path) -> None:
    file, out = task(tmp_path, "one", names=True), tmp_path / "out"
    arguments = ["train", bert, "--task", file, "--out", out, "--max-steps", 6, "--eval-every", 2]
    code, printed, err = mats(*arguments)
    assert code == 0, err
    assert "one, accuracy" in printed
    assert len(re.findall(r"\(kept\)", printed)) == 1
    assert re.search(r"6 batches; the state after batch \d is in", printed)
    assert 'labels: ["x", "y"]' in err
    assert "Writing" not in err.split("note:")[-1]
    code, _, err = mats(*arguments)
    assert code == 1
    assert "--overwrite" in err
    code, printed, err = mats(*arguments, "--overwrite", "--quiet")
    assert (code, printed) == (0, "")
    assert "error" not in err
    code, printed, err = mats(
        *arguments, "--overwrite", "--json", "--lr", "1e-3", "--freeze", "*.bias"
    )
    assert code == 0, err
    report = json.loads(printed)
    assert (report["learning_rate"], report["options"]["freeze"]) == (1e-3, ["*.bias"])
    assert report["options"]["eval_every"] == 2
    assert [c["step"] for c in report["checkpoints"]] == [2, 4, 6]


def test_defaults_are_those_of_the_paper(mats: Run, bert: Path, tmp_path: Path) -> None:
    """As far as one batch shows them."""
    file = task(tmp_path, "one")
    reports = {}
    for adapter in ("full", "ia3", "lora"):
        code, printed, err = mats(
            "train", bert, "--task", file, "--out", tmp_path / adapter, "--max-steps", 1,
            "--adapter", adapter, "--json",
        )  # fmt: skip
        assert code == 0, err
        reports[adapter] = json.loads(printed)
    rates = {name: report["learning_rate"] for name, report in reports.items()}
    assert rates == {"full": 1e-4, "ia3": 5e-3, "lora": 1e-4}
    options = reports["full"]["options"]
    assert [options[n] for n in ("eval_every", "patience", "batch_size", "weight_decay")] == [
        100, 5, 32, 0.0
    ]  # fmt: skip
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16)


def test_trained_models_are_merged(mats: Run, bert: Path, tmp_path: Path) -> None:
    """A merge keeps heads in the same files as joint training does."""
    files = [task(tmp_path, "one"), task(tmp_path, "two", 3)]
    for file in files:
        code, _, err = mats(
            "train", bert, "--task", file, "--out", tmp_path / "tuned" / file.stem, "--max-steps", 3,
            "-q",
        )  # fmt: skip
        assert code == 0, err
    joint = [part for file in files for part in ("--task", file)]
    code, _, err = mats("train", bert, *joint, "--out", tmp_path / "joint", "--max-steps", 3, "-q")
    assert code == 0, err
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"method: average\nbase: {bert}\nmodels:\n"
        + "".join(f"  - {{name: {f.stem}, model: {tmp_path}/tuned/{f.stem}}}\n" for f in files)
    )
    code, _, err = mats("merge", recipe, "--out", tmp_path / "merged")
    assert code == 0, err
    heads = {
        folder: {p.name: load_file(p) for p in (tmp_path / folder / "heads").iterdir()}
        for folder in ("merged", "joint")
    }
    assert heads["merged"].keys() == heads["joint"].keys() == {"one.safetensors", "two.safetensors"}
    for name, merged in heads["merged"].items():
        assert {n: t.shape for n, t in merged.items()} == {
            n: t.shape for n, t in heads["joint"][name].items()
        }
    tuned = load_file(tmp_path / "tuned" / "two" / "model.safetensors")
    assert torch.equal(
        heads["merged"]["two.safetensors"]["classifier.bias"], tuned["classifier.bias"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say what to train on with --task FILE"),
        (["--task", "{}/none.yaml"], "none.yaml': no such file"),
        (["--task", "sst2"], "--task 'sst2': expected a task file"),
        (["--task", "{}/one.yaml", "--adapter", "adapters"], "there is no adapter"),
        (["--task", "{}/one.yaml", "--lr", "-1"], "learning_rate: input should be greater than 0"),
        (["--task", "{}/one.yaml", "--device", "cuda:7"], "CUDA_VISIBLE_DEVICES"),
        (["--task", "{}/one.yaml", "--target-modules", "q"], "say which with --adapter"),
    ],
)
def test_errors(mats: Run, bert: Path, tmp_path: Path, options: list[str], message: str) -> None:
    task(tmp_path, "one")
    out = tmp_path / "out"
    code, _, err = mats("train", bert, "--out", out, *(o.format(tmp_path) for o in options))
    assert code == 1, err
    assert re.search(message, err.replace("\n", " ")), err
    assert not list(tmp_path.glob("*out*"))
