"""Real architectures, small: merged folders load with transformers, and compute what they should."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import matsmerge
from matsmerge import open_checkpoint

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 40,
}


def llama(**options: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, **options))


def clip() -> Any:
    vision = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    text = SMALL | {"bos_token_id": 0, "eos_token_id": 1}
    config = CLIPConfig(
        text_config=text,
        vision_config=vision | {"image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    return CLIPModel(config)


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "bert": lambda: BertModel(BertConfig(**SMALL)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=40)
    ),
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40)),
    "vit": lambda: ViTForImageClassification(
        ViTConfig(
            **{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=8, patch_size=4
        )
    ),
    "clip": clip,
}


def tuned(model: Any, seed: int) -> Any:
    """Move all weights a little, as fine-tuning would; ties stay ties."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def family(make: Callable[[], Any], folder: Path, num: int = 2) -> tuple[Path, list[Path]]:
    torch.manual_seed(0)
    base = make()
    base.save_pretrained(folder / "base")
    paths = []
    for i in range(num):
        model = type(base).from_pretrained(folder / "base")
        tuned(model, i + 1).save_pretrained(folder / f"tuned{i}", max_shard_size="20KB")
        paths.append(folder / f"tuned{i}")
    return folder / "base", paths


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("method", ["average", "ties"])
def test_merged_folder_loads(name: str, method: str, tmp_path: Path) -> None:
    base, paths = family(ARCHITECTURES[name], tmp_path)
    out = matsmerge.merge(paths, base, method, out=tmp_path / "out").folder
    cls = type(ARCHITECTURES[name]())
    merged, info = cls.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert isinstance(AutoModel.from_pretrained(out), nn.Module)
    if method == "average":
        a, b = (cls.from_pretrained(p).state_dict() for p in paths)
        for key, value in merged.state_dict().items():
            expected = (
                (a[key].double() + b[key].double()) / 2 if value.is_floating_point() else a[key]
            )
            assert torch.equal(value, expected.to(value.dtype)), key


def test_modules_merge_to_a_state_dict_that_loads() -> None:
    for name, make in ARCHITECTURES.items():
        torch.manual_seed(0)
        base, a, b = make(), tuned(make(), 1), tuned(make(), 2)
        merged = matsmerge.merge([a, b], base, "task_arithmetic", scale=0.5)
        result = base.load_state_dict(merged)
        assert not result.missing_keys, name


def test_output_dtype_and_shards(tmp_path: Path) -> None:
    base, paths = family(llama, tmp_path)
    out = tmp_path / "out"
    matsmerge.merge(paths, base, "task_arithmetic", out=out, dtype="bfloat16")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16

    from matsmerge.engine.merge_run import RunOptions, merge_to_folder
    from matsmerge.engine.prepared_merge import prepare_merge
    from matsmerge.recipes.recipe import make_recipe

    recipe = make_recipe({"models": list(map(str, paths)), "method": "average"})
    sharded = merge_to_folder(
        prepare_merge(recipe), tmp_path / "sharded", RunOptions(max_shard_bytes=6000)
    )
    assert len(list(sharded.glob("model-*-of-*.safetensors"))) > 3
    whole = matsmerge.merge(paths)
    loaded = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in whole.items())


def test_heads_stay_with_their_tasks(tmp_path: Path) -> None:
    """An encoder saved without a head as base; fine-tunes with heads of different sizes."""
    torch.manual_seed(0)
    BertModel(BertConfig(**SMALL)).save_pretrained(tmp_path / "base")
    paths = {}
    for i, num_labels in enumerate((2, 5)):
        model = BertForSequenceClassification.from_pretrained(
            tmp_path / "base", num_labels=num_labels
        )
        tuned(model, i + 1).save_pretrained(tmp_path / f"task{num_labels}")
        paths[f"task{num_labels}"] = tmp_path / f"task{num_labels}"
    with pytest.warns(UserWarning, match=r"'bert\.' in front|head"):
        out = matsmerge.merge(
            paths, tmp_path / "base", "task_arithmetic", scale=0.5, out=tmp_path / "out"
        ).folder
    encoder = AutoModel.from_pretrained(out)
    for num_labels in (2, 5):
        model = BertForSequenceClassification.from_pretrained(out, num_labels=num_labels)
        head = open_checkpoint(out / "heads" / f"task{num_labels}.safetensors")
        loaded = model.load_state_dict({n: head[n] for n in head.specs}, strict=False)
        assert not loaded.unexpected_keys
        assert model.classifier.weight.shape == (num_labels, 16)
        key = "encoder.layer.0.attention.self.query.weight"
        assert torch.equal(encoder.state_dict()[key], model.bert.state_dict()[key])


def test_tokenizer_and_generation_config_come_along(tmp_path: Path) -> None:
    base, paths = family(llama, tmp_path)
    words = {"<unk>": 0, "hello": 1, "world": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), unk_token="<unk>"
    )
    tokenizer.save_pretrained(base)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "trainer_state.json").write_text("{}")
    (base / "optimizer.pt").write_bytes(b"x")
    out = matsmerge.merge(paths, base, "task_arithmetic", out=tmp_path / "out").folder
    assert len(AutoTokenizer.from_pretrained(out)) == 3
    assert {"generation_config.json", "chat_template.jinja"} <= {p.name for p in out.iterdir()}
    assert not {"trainer_state.json", "optimizer.pt"} & {p.name for p in out.iterdir()}


def test_links_out_of_a_model_folder_are_not_copied(tmp_path: Path) -> None:
    base, paths = family(llama, tmp_path)
    (tmp_path / "secret.json").write_text("private")
    (base / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    out = tmp_path / "out"
    with pytest.raises(matsmerge.AlignmentError, match="outside of its folder"):
        matsmerge.merge(paths, base, "task_arithmetic", out=out)
    with pytest.raises(matsmerge.CheckpointError, match="outside of its folder"):
        matsmerge.merge(paths, base, "task_arithmetic", out=out, ignore_tokenizers=True)
    assert not out.exists()


def test_model_card_is_one_the_hub_reads(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    base, paths = family(llama, tmp_path)
    out = matsmerge.merge(paths, base, "ties", density=0.3, out=tmp_path / "out").folder
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == ["base", "tuned0", "tuned1"]
    assert "merge" in card.data.tags
    assert "density: 0.3" in card.text
    assert str(tmp_path) not in card.content


def adapters(config: Any, folder: Path) -> tuple[Path, list[Path]]:
    base, _ = family(llama, folder, num=0)
    paths = []
    for i in range(2):
        model = get_peft_model(LlamaForCausalLM.from_pretrained(base), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    g = torch.Generator().manual_seed(i * 100 + len(name))
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=g))
        model.save_pretrained(folder / f"adapter{i}")
        paths.append(folder / f"adapter{i}")
    return base, paths


def test_ia3_adapters_are_read_and_merged_as_tensors(tmp_path: Path) -> None:
    config = IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    base, paths = adapters(config, tmp_path)
    out = matsmerge.merge(paths, out=tmp_path / "out").folder
    merged = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), out)
    expected: dict[str, Tensor] = {}
    for path in paths:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.specs:
            expected[name] = expected.get(name, torch.tensor(0.0)) + checkpoint[name] / 2
    state = peft.get_peft_model_state_dict(merged)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value)


def test_adapters_without_their_configuration_are_refused(tmp_path: Path) -> None:
    _, paths = adapters(LoraConfig(target_modules=["q_proj"], r=2), tmp_path)
    assert any("lora_A" in name for name in open_checkpoint(paths[0]).specs)
    with pytest.raises(matsmerge.CheckpointError, match=r"tensors and no adapter_config\.json"):
        matsmerge.merge([path / "adapter_model.safetensors" for path in paths])
