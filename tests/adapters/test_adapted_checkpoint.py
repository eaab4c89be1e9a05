"""A base with an adapter folded in, against what PEFT makes of them in float64."""

import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import IA3Config, LoraConfig
from peft_models import adapt, fold, load, make_base, reconfigure
from safetensors.torch import load_file, save_file
from tiny_models import bert_config, save
from torch import Tensor
from transformers import BertForSequenceClassification, BertModel

from matsmerge.adapters.adapted_checkpoint import AdaptedCheckpoint
from matsmerge.adapters.adapter_folder import read_adapter
from matsmerge.checkpoints.checkpoint import Buffer
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.errors import CheckpointError
from matsmerge.tasks.kinds import names_in_base

# Everything an adapter does to a weight, wherever the weight is stored in its own way.
ADAPTERS: dict[str, tuple[str, Any]] = {
    "linear": ("llama", LoraConfig(target_modules=["q_proj", "down_proj"], r=3, lora_alpha=5)),
    "embedding": ("llama", LoraConfig(target_modules=["embed_tokens", "lm_head"], r=3)),
    "conv1d": ("gpt2", LoraConfig(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "convolution": ("vit", LoraConfig(target_modules=["projection", "v_proj"], r=3)),
    "relative": ("t5", LoraConfig(target_modules=["relative_attention_bias", "o"], r=2)),
    "biases": (
        "bert",
        LoraConfig(target_modules=["query", "dense"], bias="all", modules_to_save=["classifier"]),
    ),
    "lora-bias": ("bert", LoraConfig(target_modules=["query"], r=2, lora_alpha=3, lora_bias=True)),
    "both-biases": (
        "bert",
        LoraConfig(target_modules=["query"], r=2, lora_alpha=3, lora_bias=True, bias="lora_only"),
    ),
    "saved": (
        "llama",
        LoraConfig(target_modules=["q_proj"], modules_to_save=["norm", "embed_tokens"]),
    ),
    "dora": ("llama", LoraConfig(target_modules=["q_proj", "down_proj"], r=3, use_dora=True)),
    "dora-conv1d": (
        "gpt2",
        LoraConfig(target_modules=["c_attn", "c_proj"], use_dora=True, fan_in_fan_out=True),
    ),
    "dora-convolution": ("vit", LoraConfig(target_modules=["projection"], use_dora=True)),
    "dora-embedding": ("bert", LoraConfig(target_modules=["word_embeddings"], use_dora=True)),
    "ia3": (
        "bert",
        IA3Config(target_modules=["key", "output.dense"], feedforward_modules=["output.dense"]),
    ),
    "ia3-conv1d": (
        "gpt2",
        IA3Config(
            target_modules=["c_attn", "c_proj"],
            feedforward_modules=["c_proj"],
            fan_in_fan_out=True,
        ),
    ),
    "ia3-convolution": ("vit", IA3Config(target_modules=["projection"], feedforward_modules=[])),
    "ia3-convolution-inputs": (
        "vit",
        IA3Config(target_modules=["projection"], feedforward_modules=["projection"]),
    ),
}
Make = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The folders of a base and of one of the adapters, each made once."""
    bases = cache(lambda name: make_base(name, tmp_path_factory.mktemp("base")))

    @cache
    def made(name: str) -> tuple[Path, Path]:
        architecture, config = ADAPTERS[name]
        base = bases(architecture)
        return base, adapt(base, config, tmp_path_factory.mktemp(name))

    return made


def open_adapted(base: Path, adapter: Path) -> AdaptedCheckpoint:
    opened = open_checkpoint(base)
    found = read_adapter(open_checkpoint(adapter))
    assert found is not None
    return AdaptedCheckpoint(opened, found, names_in_base(found, opened))


def read(checkpoint: AdaptedCheckpoint, name: str, start: int, stop: int) -> Tensor:
    """Elements with all the digits that there are."""
    buffer = Buffer(stop - start, checkpoint.read_dtype(name))
    checkpoint.read_into(buffer, name, start)
    return buffer.tensor


@pytest.mark.parametrize("name", ADAPTERS)
def test_values_are_those_that_peft_folds(name: str, make: Make, tmp_path: Path) -> None:
    base, adapter = make(name)
    adapted = open_adapted(base, adapter)
    # Saved and read again, PEFT's has the names of the file.
    model = load(base).double()
    model.load_state_dict(fold(base, adapter))
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    assert {n: s.shape for n, s in adapted.specs.items()} == {
        n: tuple(v.shape) for n, v in expected.items()
    }
    stored = load_file(base / "model.safetensors")
    for tensor, spec in adapted.specs.items():
        values = read(adapted, tensor, 0, spec.num_elements).double().view(spec.shape)
        torch.testing.assert_close(values, expected[tensor], rtol=1e-12, atol=1e-12)
        assert adapted[tensor].dtype == spec.dtype == torch.float32
        torch.testing.assert_close(adapted[tensor], expected[tensor].float(), rtol=2e-7, atol=1e-9)
        if tensor not in adapted.changed:
            assert torch.equal(adapted[tensor], stored[tensor])
    changed = {n for n, v in expected.items() if not torch.equal(v, stored[n].double())}
    assert changed <= adapted.changed


@pytest.mark.parametrize("name", ["convolution", "dora-conv1d", "both-biases", "ia3-conv1d"])
def test_any_stretch_is_one_of_the_whole(name: str, make: Make) -> None:
    base, adapter = make(name)
    adapted = open_adapted(base, adapter)
    whole = {n: read(adapted, n, 0, adapted.specs[n].num_elements) for n in adapted.changed}

    @given(st.data())
    def check(data: st.DataObject) -> None:
        tensor = data.draw(st.sampled_from(sorted(adapted.changed)))
        start = data.draw(st.integers(0, len(whole[tensor]) - 1))
        stop = data.draw(st.integers(start + 1, len(whole[tensor])))
        found = read(adapted, tensor, start, stop)
        torch.testing.assert_close(found, whole[tensor][start:stop], rtol=1e-13, atol=1e-13)

    check()


@pytest.mark.parametrize("name", ["dora", "dora-conv1d"])
def test_norms_of_many_rows(name: str, monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """Computed a few rows at a time they are the same."""
    adapted = open_adapted(*make(name))
    expected = {tensor: adapted[tensor] for tensor in adapted.changed}
    monkeypatch.setattr("matsmerge.adapters.adapted_checkpoint._NORM_ELEMENTS", 100)
    few_at_once = open_adapted(*make(name))
    for tensor, values in expected.items():
        torch.testing.assert_close(few_at_once[tensor], values)


def test_copies_in_other_processes(make: Make) -> None:
    """A copy reads the same, also one of a checkpoint that has been read."""
    base, adapter = make("dora")
    adapted = open_adapted(base, adapter)
    fresh = pickle.loads(pickle.dumps(adapted))
    values = {name: adapted[name] for name in adapted.specs}
    used = pickle.loads(pickle.dumps(adapted))
    for copied in (fresh, used):
        assert all(torch.equal(copied[name], value) for name, value in values.items())


def test_half_precision(tmp_path: Path) -> None:
    """A change is computed in float32, and rounded once."""
    base = make_base("llama", tmp_path / "base")
    load(base).bfloat16().save_pretrained(tmp_path / "half")
    config = LoraConfig(target_modules=["q_proj"], r=2)
    adapter = adapt(tmp_path / "half", config, tmp_path / "adapter")
    adapted = open_adapted(tmp_path / "half", adapter)
    folded = fold(tmp_path / "half", adapter)
    for name in adapted.changed:
        assert adapted.read_dtype(name) == torch.float32
        assert adapted[name].dtype == torch.bfloat16
        whole = read(adapted, name, 0, adapted.specs[name].num_elements).view(folded[name].shape)
        torch.testing.assert_close(whole, folded[name].float(), rtol=1e-6, atol=1e-6)
        assert torch.equal(adapted[name], whole.bfloat16())
    (other, *_) = set(adapted.specs) - adapted.changed
    assert adapted.read_dtype(other) == torch.bfloat16


def test_an_encoder_without_its_head(tmp_path: Path) -> None:
    """Adapters of a model with a head, on the encoder alone; the head is a tensor of its own."""
    torch.manual_seed(0)
    base = save(BertModel(bert_config()), tmp_path / "base")
    torch.manual_seed(0)  # for the pooler, which is new
    model = BertForSequenceClassification.from_pretrained(base, num_labels=5)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    config = LoraConfig(target_modules=["query"], r=2, task_type="SEQ_CLS")
    adapted = open_adapted(base, adapt(model, config, tmp_path / "adapter"))
    again = BertForSequenceClassification.from_pretrained(base, num_labels=5)
    again.load_state_dict(state)
    expected = fold(again, tmp_path / "adapter")
    weights = {f"encoder.layer.{i}.attention.self.query.weight" for i in range(2)}
    assert adapted.changed == {*weights, "classifier.weight", "classifier.bias"}
    for name in adapted.changed:
        own = name if name.startswith("classifier") else f"bert.{name}"
        torch.testing.assert_close(adapted[name], expected[own].float())


def test_tensors_that_do_not_belong_together(make: Make, tmp_path: Path) -> None:
    """All that is wrong with an adapter's own tensors is said before a base is looked at."""
    _, adapter = make("linear")
    state = load_file(adapter / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    path = tmp_path / "adapter_model.safetensors"
    stem = "base_model.model.model.layers.0.self_attn.q_proj"

    def check(message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            read_adapter(open_checkpoint(tmp_path))
        assert caught.value.problems[0].startswith(str(tmp_path))

    save_file({k: v for k, v in state.items() if k != f"{stem}.lora_B.weight"}, path)
    check("'model.layers.0.self_attn.q_proj' has A; expected lora_A and lora_B")
    save_file(state | {f"{stem}.lora_magnitude_vector": torch.ones(16)}, path)
    check("'model.layers.0.self_attn.q_proj' has a magnitude vector, and use_dora is False")
    save_file({k.removeprefix("base_model.model."): v for k, v in state.items()}, path)
    check("does not begin with 'base_model.model.', as PEFT saves it")
    save_file(state, path)
    reconfigure(tmp_path, r=4)
    check(r"has factors \[3, 16\] and \[16, 3\]; adapter_config.json says rank 4")
    reconfigure(tmp_path, r=3, use_dora=True)
    check("lacks the magnitude vector, and use_dora is True")
