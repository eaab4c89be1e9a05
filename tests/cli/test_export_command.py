"""`mats export`: a folder for transformers, and commands of other programs."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from tiny_models import bert_config, llama_config, make_tokenizer, save
from transformers import BertForSequenceClassification, BertModel, LlamaForCausalLM

Run = Callable[..., tuple[int, str, str]]


def test_from_merging_to_using(mats: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of a merge and the card say how the model is used; both are true."""
    save(BertModel(bert_config()), tmp_path / "base", make_tokenizer())
    for seed, name in enumerate(("amazon", "imdb")):
        config = bert_config(num_labels=2 + seed)
        folder = tmp_path / name / "model"
        save(BertForSequenceClassification(config), folder, make_tokenizer(), seed=seed)
    out = tmp_path / "merged"
    code, said, err = mats(
        "merge", tmp_path / "amazon" / "model", f"film={tmp_path / 'imdb' / 'model'}",
        "--base", tmp_path / "base", "--out", out,
    )  # fmt: skip
    assert code == 0, err
    card = (out / "README.md").read_text()
    assert "| film | 1 |" in card
    assert f'matsmerge.load("{out}", task="' in said
    (call,) = (line for line in card.splitlines() if line.startswith("model = "))
    assert call == 'model = matsmerge.load("merged", task="model")  # or film'
    command = said[said.index("mats export") :].split(", or ")[0].splitlines()[0]
    monkeypatch.chdir(tmp_path)
    code, said, err = mats(*shlex.split(command)[1:])
    assert code == 0, err
    assert "transformers.pipeline" in said
    assert (tmp_path / "merged-model" / "config.json").exists()
    assert "--task film on the command line" in mats("export", out, "--out", tmp_path / "o")[2]
    assert mats("export", out)[2].count("--out") == 1
    assert "print a command" in mats("export", out, "--gguf", "--task", "film")[2]


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    return save(LlamaForCausalLM(llama_config()), tmp_path / "lm", make_tokenizer())


def test_commands_for_full_models(mats: Run, language_model: Path) -> None:
    code, said, err = mats("export", language_model, "--gguf", "--vllm")
    assert code == 0, err
    assert [shlex.split(line) for line in said.splitlines()] == [
        ["python", "convert_hf_to_gguf.py", str(language_model),
         "--outfile", "lm.gguf", "--outtype", "auto"],
        ["vllm", "serve", str(language_model)],
    ]  # fmt: skip


@pytest.mark.parametrize(("rank", "limit"), [(8, "8"), (9, "16"), (40, "64"), (300, "320")])
def test_commands_for_adapters(
    rank: int, limit: str, mats: Run, language_model: Path, tmp_path: Path
) -> None:
    folder = make_lora(language_model, tmp_path / "lora", rank)
    code, said, err = mats("export", folder, "--gguf", "--vllm", "--json")
    assert code == 0, err
    convert, serve = (shlex.split(c) for c in json.loads(said)["commands"])
    assert convert[1:5] == ["convert_lora_to_gguf.py", str(folder), "--base", str(language_model)]
    assert serve[-2:] == ["--max-lora-rank", limit]
    assert f"lora={folder}" in serve
    assert ("more than the 16 that vLLM allows" in err) == (rank > 16)


def test_too_large_a_rank(mats: Run, language_model: Path, tmp_path: Path) -> None:
    folder = make_lora(language_model, tmp_path / "lora", 513)
    code, _, err = mats("export", folder, "--vllm")
    assert code == 1
    assert "has rank 513, and vLLM takes LoRAs of rank 512 at most" in err


def make_lora(base: Path, folder: Path, rank: int) -> Path:
    model: Any = LlamaForCausalLM.from_pretrained(base)
    settings = LoraConfig(r=rank, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, settings).save_pretrained(folder)
    return folder
