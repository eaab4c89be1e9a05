"""`mats stats compress`, and sketches in `mats collect`, `mats stats combine`, `mats inspect`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import bert_config, make_tokenizer, save, write_rows
from torch import nn
from transformers import BertForSequenceClassification

import matsmerge

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Statistics of two layers, of which one is narrow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 10), nn.Linear(10, 3))
    out = tmp_path / "full.safetensors"
    matsmerge.collect(model, [torch.randn(200, 60) * 0.8 ** torch.arange(60)], out=out, rank="full")
    return out


def test_statistics_of_another_model_are_not_forced_to_belong(
    mats: Run, full: Path, tmp_path: Path
) -> None:
    other = save(BertForSequenceClassification(bert_config()), tmp_path / "other")
    code, _, err = mats("inspect", full, other)
    assert code == 1
    assert "was collected from another model" in err
    assert "--force" not in err  # which is for --subspace alone


def test_all_files_that_cannot_be_combined_are_named(mats: Run, full: Path, tmp_path: Path) -> None:
    wrong = [tmp_path / name for name in ("short.safetensors", "none.safetensors")]
    wrong[0].write_bytes(full.read_bytes()[:-8])
    out = tmp_path / "all.safetensors"
    code, _, err = mats("stats", "combine", full, *wrong, "--out", out)
    assert code == 1
    assert all(file.name in err for file in wrong)
    assert not out.exists()


def test_compressing_and_inspecting(mats: Run, full: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.safetensors"
    code, printed, err = mats("stats", "compress", full, "--rank", 14, "--out", out)
    assert code == 0, err
    assert "of rank 14 in" in printed
    assert out.stat().st_size < full.stat().st_size
    code, printed, _ = mats("inspect", out)
    assert (
        "sketches of rank 14: 1 second moments; whole, which is no larger for them: 1"
        in " ".join(printed.split())
    )
    spectra = {}
    for file in (full, out):
        code, printed, _ = mats("inspect", file, "--json")
        spectra[file] = json.loads(printed)["spectra"]
    small, whole = spectra[out]["inputs/0"], spectra[full]["inputs/0"]
    assert (small["dim"], small["rank"], whole["rank"]) == (60, 14, 60)
    eigenvalues = torch.linalg.eigvalsh(matsmerge.open_statistics(full).gram("0").double()).flip(0)
    explained = float(eigenvalues[:14].sum() / eigenvalues.sum())
    assert 0.9 * explained < small["explained"] < 1.01 * explained
    assert whole["explained"] == spectra[out]["inputs/1"]["explained"] == 1
    assert small["effective_rank"] == pytest.approx(whole["effective_rank"], rel=0.3)


def test_what_cannot_be_done(mats: Run, full: Path, tmp_path: Path) -> None:
    small, other = tmp_path / "small.safetensors", tmp_path / "other.safetensors"
    mats("stats", "compress", full, "--rank", 14, "--out", small)
    for arguments, message in (
        (("compress", small, "--rank", 15, "--out", other), "holds sketches of rank 14"),
        (("compress", full, "--rank", 40, "--out", other), "give a smaller rank"),
        (("compress", full, "--rank", 14, "--out", small), "--overwrite"),
        (("compress", full, "--rank", 14, "--out", other, "--dtype", "int8"), "stored as auto"),
        (("combine", small, full, "--out", other, "--force"), "second moments in full"),
    ):
        code, _, err = mats("stats", *arguments)
        assert code != 0
        assert message in " ".join(err.split())
        assert not other.exists()


def test_collecting_with_a_rank(mats: Run, tmp_path: Path) -> None:
    model = BertForSequenceClassification(bert_config(num_labels=3))
    folder = save(model, tmp_path / "model", make_tokenizer())
    rows = [{"text": "a b c d"[: 1 + 2 * (i % 4)], "label": i % 3} for i in range(8)]
    write_rows(tmp_path / "data.jsonl", rows)
    out = tmp_path / "s.safetensors"
    command = ["collect", folder, "--data", tmp_path / "data.jsonl", "--out", out]
    code, printed, err = mats(*command, "--statistics", "kfac", "--rank", 8)
    assert code == 0, err
    assert "sketches of rank 8" in printed
    statistics = matsmerge.open_statistics(out)
    assert statistics.truncated_gram("bert.encoder.layer.0.output.dense", bias=True) is not None
    assert statistics.truncated_gram("classifier") is None
    for rank, message in (("60", "widest that is collected has 32"), ("some", "found 'some'")):
        code, _, err = mats(*command, "--overwrite", "--rank", rank)
        assert code != 0
        assert message in " ".join(err.split())
    code, _, err = mats(*command, "--overwrite", "--rank", 8, "--statistics", "fisher")
    assert code == 1
    assert "is of gram and kfac, and fisher has none" in " ".join(err.split())
    for rank in ("full", "auto"):
        code, printed, err = mats(*command, "--overwrite", "--rank", rank, "--json")
        assert code == 0, err
        assert json.loads(printed)["num_sketches"] == 0
