"""`mats collect` within a limit of memory, and what it says before it starts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import (
    SIZES,
    llama_config,
    make_tokenizer,
    mixtral_config,
    save,
    write_rows,
)
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    LlamaForCausalLM,
    MixtralForCausalLM,
)

from matsmerge.checkpoints.safetensors_header import read_header
from matsmerge.statistics.statistics_file import open_statistics

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asked(tmp_path: Path) -> list[object]:
    """A model and its data, as arguments."""
    save(LlamaForCausalLM(llama_config()), tmp_path / "model", make_tokenizer())
    write_rows(tmp_path / "data.jsonl", [{"text": t} for t in ("a b c", "d e", "e f g h")])
    return [tmp_path / "model", "--data", tmp_path / "data.jsonl", "--statistics", "kfac"]


def test_what_does_not_fit_is_collected_block_by_block(
    mats: Run, asked: list[object], tmp_path: Path
) -> None:
    whole, blocks = tmp_path / "whole.safetensors", tmp_path / "blocks.safetensors"
    assert mats("collect", *asked, "--out", whole)[0] == 0
    code, said, _ = mats("collect", *asked, "--out", blocks, "--dry-run", "--json")
    assert code == 0
    needs = json.loads(said)
    assert not needs["by_blocks"]
    assert not blocks.exists()
    limit = needs["memory_bytes_whole"] - 1
    code, said, _ = mats(
        "collect", *asked, "--out", blocks, "--max-memory", limit, "--dry-run", "--json"
    )
    planned = json.loads(said)
    assert planned["by_blocks"]
    assert (planned["num_blocks"], planned["num_passes"]) == (2, 2)
    assert planned["memory_bytes"] == limit
    code, _, error = mats("collect", *asked, "--out", blocks, "--max-memory", limit)
    assert code == 0
    assert "block by block, and when interrupted begins again" in " ".join(error.split())
    ours, theirs = open_statistics(blocks), open_statistics(whole)
    assert ours.header == theirs.header
    values = sum(spec.num_elements for spec in theirs.arrays.specs.values())
    assert planned["file_bytes"] == pytest.approx(4 * values, rel=0.1)
    for name in theirs.arrays.specs:
        torch.testing.assert_close(ours.arrays[name], theirs.arrays[name], rtol=1e-3, atol=1e-6)


def test_what_fits_is_collected_as_ever(mats: Run, asked: list[object], tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    assert mats("collect", *asked, "--out", one)[0] == 0
    code, _, error = mats("collect", *asked, "--out", other, "--max-memory", "1GB")
    assert code == 0
    assert "block by block" not in error
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("rank", ["2", "full"])
def test_the_size_of_the_file_is_what_was_said(
    mats: Run, asked: list[object], tmp_path: Path, rank: str
) -> None:
    """Numbers of sketches take a quarter of the bytes of all others, but for their diagonals."""
    out = tmp_path / "out.safetensors"
    code, said, _ = mats("collect", *asked, "--rank", rank, "--out", out, "--dry-run", "--json")
    assert code == 0
    assert mats("collect", *asked, "--rank", rank, "--out", out)[0] == 0
    found = open_statistics(out)
    assert (found.header.sketching is None) == (rank == "full")
    num_bytes = sum(spec.num_bytes for spec in read_header(out).specs.values())
    assert json.loads(said)["file_bytes"] == pytest.approx(num_bytes, rel=0.1)


def test_needs_are_said(mats: Run, asked: list[object], tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    code, said, _ = mats("collect", *asked, "--out", out, "--dry-run")
    assert code == 0
    assert "3 examples, with all of the model in memory, one pass over the data" in said
    assert "block by block at least" in said
    assert not out.exists()


def test_a_mixture_of_experts(mats: Run, asked: list[object], tmp_path: Path) -> None:
    """Of which transformers makes other tensors than those that are stored."""
    save(MixtralForCausalLM(mixtral_config()), tmp_path / "model", make_tokenizer())
    whole, blocks = tmp_path / "whole.safetensors", tmp_path / "blocks.safetensors"
    assert mats("collect", *asked, "--out", whole)[0] == 0
    code, said, _ = mats("collect", *asked, "--out", blocks, "--dry-run", "--json")
    assert code == 0
    needs = json.loads(said)
    found = open_statistics(whole)
    values = sum(spec.num_elements for spec in found.arrays.specs.values())
    assert 4 * values <= 1.1 * needs["file_bytes"]  # experts without tokens are not in the file
    limit = needs["memory_bytes_whole"] - 1
    code, _, error = mats("collect", *asked, "--out", blocks, "--max-memory", limit)
    assert code == 0
    assert "block by block" in error
    assert open_statistics(blocks).header == found.header


def test_a_model_that_cannot_be_cut(mats: Run, asked: list[object], tmp_path: Path) -> None:
    config = AlbertConfig(**SIZES, vocab_size=24, embedding_size=8, num_labels=2)
    save(AlbertForSequenceClassification(config), tmp_path / "model", make_tokenizer())
    write_rows(tmp_path / "data.jsonl", [{"text": "a b", "label": 1}, {"text": "c", "label": 0}])
    code, said, error = mats("collect", *asked, "--dry-run")
    assert code == 0
    assert "2 examples, with all of the model in memory" in said
    assert "memory         at least" in said
    assert "cannot be run block by block" in " ".join(error.split())
    code, _, error = mats("collect", *asked, "--dry-run", "--max-memory", "1kB")
    assert code != 0
    assert "cannot be run block by block" in " ".join(error.split())


def test_what_cannot_be_done_is_refused(mats: Run, asked: list[object], tmp_path: Path) -> None:
    code, _, error = mats("collect", *asked, "--max-memory", "20kB")
    assert code != 0
    assert "--max-memory allows 20 kB; allow more" in " ".join(error.split())
    code, _, error = mats("collect", *asked, "--max-memory", "1GB", "--device-map", "auto")
    assert code != 0
    assert "give either --device-map, or --max-memory" in " ".join(error.split())
    adapted = get_peft_model(
        LlamaForCausalLM.from_pretrained(tmp_path / "model"), LoraConfig(target_modules=["q_proj"])
    )
    adapted.save_pretrained(tmp_path / "lora")
    code, _, error = mats("collect", tmp_path / "lora", *asked[1:], "--max-memory", "1GB")
    assert code != 0
    assert "is an adapter, whose base is loaded as a whole" in " ".join(error.split())
