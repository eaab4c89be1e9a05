"""`mats extract-lora`: a LoRA that makes the fine-tuned model of its base again."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft_models import MODELS, adapt, config_of, load, logits, make_base, put_on
from safetensors.torch import load_file
from tiny_models import bert_config, save
from transformers import BertForSequenceClassification, BertModel

Run = Callable[..., tuple[int, str, str]]


def tune(base: Path, folder: Path, *, only_linear: bool = False) -> Any:
    """Move all weights of a model, or those of its linear layers, and save it."""
    model = load(base)
    torch.manual_seed(7)
    with torch.no_grad():
        for module in model.modules():
            is_linear = type(module).__name__ in ("Linear", "Conv1D")
            for name, parameter in module.named_parameters(recurse=False):
                if not only_linear or (is_linear and name == "weight"):
                    parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return load(folder)


@pytest.mark.parametrize("architecture", [name for name in MODELS if name not in ("gpt2", "t5")])
def test_with_the_rest_it_is_the_model(architecture: str, tmp_path: Path, mats: Run) -> None:
    base = make_base(architecture, tmp_path / "base")
    tuned = tune(base, tmp_path / "tuned")
    code, _, error = mats(
        "extract-lora", tmp_path / "tuned", "--base", base, "--rank", 16, "--keep-rest",
        "--out", tmp_path / "lora",
    )  # fmt: skip
    assert code == 0, error
    found = logits(put_on(base, tmp_path / "lora"))
    torch.testing.assert_close(found, logits(tuned), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["gpt2", "t5"])
def test_tied_weights_stay_with_the_base(architecture: str, tmp_path: Path, mats: Run) -> None:
    base = make_base(architecture, tmp_path / "base")
    tune(base, tmp_path / "tuned")
    tied = "transformer.wte.weight" if architecture == "gpt2" else "shared.weight"
    code, _, error = mats(
        "extract-lora", tmp_path / "tuned", "--base", base, "--rank", 4, "--keep-rest",
        "--out", tmp_path / "lora", "--json",
    )  # fmt: skip
    assert code == 0, error
    assert "no adapter can" in (tmp_path / "lora" / "README.md").read_text()
    names = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert f"base_model.model.{tied}" not in names
    put_on(base, tmp_path / "lora")


def test_linear_changes_alone(tmp_path: Path, mats: Run) -> None:
    """Transposed weights (GPT-2), exact at full rank, and what a low rank keeps."""
    base = make_base("gpt2", tmp_path / "base")
    tuned = tune(base, tmp_path / "tuned", only_linear=True)
    for rank in (16, 2):
        code, out, error = mats(
            "extract-lora", tmp_path / "tuned", "--base", base, "--rank", rank,
            "--out", tmp_path / f"lora{rank}", "--json",
        )  # fmt: skip
        assert code == 0, error
        layers = json.loads(out)["layers"]
        assert len(layers) == 8
    found = logits(put_on(base, tmp_path / "lora16"))
    # The output layer is tied to the embedding, which it would change.
    before = load(base)
    before.transformer.h = load(tmp_path / "tuned").transformer.h
    torch.testing.assert_close(found, logits(before), rtol=1e-5, atol=1e-5)
    for module, layer in layers.items():
        parts = [
            load(p).get_submodule(module).weight.detach().double()
            for p in (tmp_path / "tuned", base)
        ]
        values = torch.linalg.svdvals(parts[0] - parts[1]).square()
        assert layer["rank"] == 2
        assert layer["energy"] == pytest.approx(float(values[:2].sum() / values.sum()), abs=1e-9)
    assert tuned is not None


def test_new_heads_come_along(tmp_path: Path, mats: Run) -> None:
    base = save(BertModel(bert_config()), tmp_path / "base")
    model = BertForSequenceClassification.from_pretrained(base, num_labels=4)
    save(model, tmp_path / "tuned", seed=3)
    code, _, error = mats(
        "extract-lora", tmp_path / "tuned", "--base", base, "--rank", 3, "--out", tmp_path / "lora"
    )
    assert code == 0, error
    assert config_of(tmp_path / "lora")["modules_to_save"] == ["classifier"]
    assert config_of(tmp_path / "lora")["task_type"] == "SEQ_CLS"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the head is new
        empty = BertForSequenceClassification.from_pretrained(base, num_labels=4)
    adapted = put_on(empty, tmp_path / "lora")
    classifier = adapted.base_model.model.classifier.modules_to_save["default"]
    assert torch.equal(classifier.weight, model.classifier.weight)


def test_chosen_modules_and_what_is_left_out(tmp_path: Path, mats: Run) -> None:
    base = make_base("llama", tmp_path / "base")
    tune(base, tmp_path / "tuned")
    code, out, error = mats(
        "extract-lora", tmp_path / "tuned", "--base", base, "--rank", 2, "--modules", "*.q_proj",
        "--out", tmp_path / "lora", "--json",
    )  # fmt: skip
    assert code == 0, error
    result = json.loads(out)
    assert set(result["layers"]) == {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    assert "changed, but not in the LoRA" in result["notes"][0]


def test_what_is_refused(tmp_path: Path, mats: Run) -> None:
    base = make_base("llama", tmp_path / "base")
    tune(base, tmp_path / "tuned")
    lora = adapt(base, LoraConfig(r=2, target_modules=["q_proj"]), tmp_path / "adapter")
    out = tmp_path / "out"
    for arguments, message in (
        ([tmp_path / "tuned", "--base", base, "--rank", 999], "999 is larger than every layer"),
        ([base, "--base", base, "--rank", 2], "no linear layer differs"),
        ([lora, "--base", base, "--rank", 2], "is an adapter already"),
        ([tmp_path / "tuned", "--base", base, "--rank", 2, "--modules", "x"], "matches 'x'"),
        ([tmp_path / "none", "--base", base, "--rank", 2], "no such file or folder"),
    ):
        code, _, error = mats("extract-lora", *arguments, "--out", out)
        assert code == 1
        assert message in " ".join(error.split())
        assert not out.exists()
