"""PEFT adapters on their base."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import bert_config, llama_config, make_tokenizer, save, t5_config, vit_config
from transformers import (
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    ViTForImageClassification,
)

from matsmerge.adapters.adapted_checkpoint import AdaptedCheckpoint
from matsmerge.errors import CheckpointError, DataError
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.task_file import TaskFile

IA3 = IA3Config(
    target_modules=["k_proj", "v_proj", "down_proj"],
    feedforward_modules=["down_proj"],
    task_type="CAUSAL_LM",
)


def adapt(model: Any, config: Any, folder: Path, seed: int = 0) -> Any:
    """Put an adapter with random values on a model and save it."""
    adapted = get_peft_model(model, copy.deepcopy(config))  # which PEFT writes to
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return adapted.eval()


def llama(folder: Path) -> tuple[Path, Any]:
    base = save(LlamaForCausalLM(llama_config()), folder, make_tokenizer())
    return base, LlamaForCausalLM.from_pretrained(base)


def check(loaded: LoadedModel, folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    parameters = dict(loaded.model.named_parameters())
    assert set(loaded.names.values()) == set(tensors)
    for name, stored in loaded.names.items():
        assert torch.equal(parameters[name], tensors[stored]), name
    trained = {name for name, p in parameters.items() if p.requires_grad}
    assert trained == {*loaded.names, *loaded.head_names}
    assert set(loaded.checkpoint.specs) == set(tensors)
    assert not loaded.model.training


def check_folded(loaded: LoadedModel, adapted: Any, trained: set[str]) -> None:
    """The weights are those that PEFT folds, and what the adapter changes takes gradients."""
    parameters = dict(loaded.model.named_parameters())
    assert {name for name, p in parameters.items() if p.requires_grad} == trained
    folded = copy.deepcopy(adapted).merge_and_unload()
    for name, expected in folded.named_parameters():
        torch.testing.assert_close(parameters[name].detach(), expected.detach())
    assert isinstance(loaded.checkpoint, AdaptedCheckpoint)
    assert loaded.checkpoint.changed == {
        loaded.names[name] for name in trained if name in loaded.names
    }
    for name in trained & loaded.names.keys():
        assert torch.equal(parameters[name], loaded.checkpoint[loaded.names[name]])


LAYERS = [f"model.layers.{i}.self_attn" for i in range(2)]


@pytest.mark.parametrize(
    "config",
    [
        IA3,
        LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"),
        LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM", use_dora=True),
    ],
)
def test_adapters(config: Any, tmp_path: Path) -> None:
    base, model = llama(tmp_path / "base")
    adapted = adapt(model, config, tmp_path / "adapter")
    loaded = load_model(tmp_path / "adapter")
    assert loaded.task.kind == "causal_lm"
    assert loaded.base is not None
    assert loaded.base.place == base
    if config is IA3:
        assert isinstance(loaded.model, PeftModel)
        check(loaded, tmp_path / "adapter")
    else:
        check_folded(loaded, adapted, {f"{layer}.q_proj.weight" for layer in LAYERS})
    ids = torch.tensor([[2, 4, 5, 6]])
    torch.testing.assert_close(loaded.model(input_ids=ids).logits, adapted(input_ids=ids).logits)
    batch = loaded.task.collate([loaded.task.encode({"input": "a", "target": "b"}, 0)])
    loaded.task.predict(loaded.model, batch).losses().sum().backward()
    with_gradient = {n for n, p in loaded.model.named_parameters() if p.grad is not None}
    assert with_gradient == {n for n, p in loaded.model.named_parameters() if p.requires_grad}


def test_other_weights_beside_those_of_a_lora(tmp_path: Path) -> None:
    _, model = llama(tmp_path / "base")
    config = LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
    adapted = adapt(model, config, tmp_path / "adapter")
    loaded = load_model(tmp_path / "adapter", also=["*.v_proj.*"])
    trained = {n for n, p in loaded.model.named_parameters() if p.requires_grad}
    assert trained == {f"{layer}.{x}_proj.weight" for layer in LAYERS for x in "qv"}
    ids = torch.tensor([[2, 4, 5, 6]])
    torch.testing.assert_close(loaded.model(input_ids=ids).logits, adapted(input_ids=ids).logits)


def test_names(tmp_path: Path) -> None:
    _, model = llama(tmp_path / "base")
    adapt(model, IA3, tmp_path / "adapter")
    names = load_model(tmp_path / "adapter").names
    stem = "base_model.model.model.layers.0.self_attn.k_proj.ia3_l"
    assert names[f"{stem}.default"] == stem


def test_encoder_decoders(tmp_path: Path) -> None:
    base = save(
        T5ForConditionalGeneration(t5_config()), tmp_path / "base", make_tokenizer(begin=False)
    )
    config = IA3Config(
        target_modules=["k", "v", "wo"], feedforward_modules=["wo"], task_type="SEQ_2_SEQ_LM"
    )
    adapted = adapt(T5ForConditionalGeneration.from_pretrained(base), config, tmp_path / "adapter")
    loaded = load_model(tmp_path / "adapter", TaskFile(task="multiple_choice"))
    check(loaded, tmp_path / "adapter")
    row = {"input": "a b", "choices": ["c", "d e"], "label": 0}
    batch = loaded.task.collate([loaded.task.encode(row, 0)])
    scores = loaded.task.predict(loaded.model, batch).logits[0]
    for choice, score in zip(([6, 3], [7, 8, 3]), scores, strict=True):
        loss = adapted(input_ids=torch.tensor([[4, 5, 3]]), labels=torch.tensor([choice])).loss
        torch.testing.assert_close(score, -loss * len(choice))


QUERIES = {f"bert.encoder.layer.{i}.attention.self.query.weight" for i in range(2)}


@pytest.mark.parametrize("base_class", [BertModel, BertForSequenceClassification])
def test_classifiers_come_with_the_adapter(base_class: Any, tmp_path: Path) -> None:
    base = save(base_class(bert_config()), tmp_path / "base", make_tokenizer())
    model = BertForSequenceClassification.from_pretrained(
        base, num_labels=5, ignore_mismatched_sizes=True
    )
    config = LoraConfig(target_modules=["query"], r=2, task_type="SEQ_CLS")
    adapted = adapt(model, config, tmp_path / "adapter")
    loaded = load_model(tmp_path / "adapter")
    assert loaded.task.kind == "sequence_classification"
    check_folded(loaded, adapted, {*QUERIES, "classifier.weight", "classifier.bias"})
    assert loaded.names["classifier.weight"] == "classifier.weight"
    example = loaded.task.encode({"text": "a b", "label": 4}, 0)
    logits = loaded.task.predict(loaded.model, loaded.task.collate([example])).logits
    expected = adapted(input_ids=torch.tensor([[2, 4, 5, 3]])).logits
    torch.testing.assert_close(logits, expected)


def test_a_head_in_a_file_of_its_own(tmp_path: Path) -> None:
    base = save(BertModel(bert_config()), tmp_path / "base", make_tokenizer())
    model = BertForSequenceClassification.from_pretrained(base, num_labels=3)
    config = LoraConfig(target_modules=["query"], r=2, task_type="SEQ_CLS")
    adapted = adapt(model, config, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    state = load_file(path)
    head = {name: state.pop(name) for name in list(state) if "classifier" in name}
    save_file(state, path)
    save_file(head, tmp_path / "head.safetensors")
    with pytest.raises(DataError, match="give the head as `head:`"):
        load_model(tmp_path / "adapter")
    loaded = load_model(tmp_path / "adapter", head=tmp_path / "head.safetensors")
    check_folded(loaded, adapted, QUERIES)
    assert set(loaded.head_names.values()) == set(head)
    ids = torch.tensor([[2, 4, 5, 3]])
    torch.testing.assert_close(loaded.model(input_ids=ids).logits, adapted(input_ids=ids).logits)


def test_images_and_adapters_without_a_task(tmp_path: Path) -> None:
    base = save(ViTForImageClassification(vit_config(num_labels=3)), tmp_path / "base")
    config = LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["classifier"])
    adapted = adapt(ViTForImageClassification.from_pretrained(base), config, tmp_path / "adapter")
    loaded = load_model(tmp_path / "adapter")
    assert loaded.task.kind == "image_classification"
    queries = {f"vit.layers.{i}.attention.q_proj.weight" for i in range(2)}
    check_folded(loaded, adapted, {*queries, "classifier.weight", "classifier.bias"})
    pixels = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(
        loaded.model(pixel_values=pixels).logits, adapted(pixel_values=pixels).logits
    )


def test_relative_bases_and_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base's path is relative to the current directory; the adapter's own tokenizer wins."""
    _, model = llama(tmp_path / "base")
    adapt(model, IA3, tmp_path / "adapter")
    settings = tmp_path / "adapter" / "adapter_config.json"
    content = json.loads(settings.read_text())
    settings.write_text(json.dumps(content | {"base_model_name_or_path": "base"}))
    with pytest.raises(
        CheckpointError, match="adapter_config.json: its base: base: no such file or folder"
    ):
        load_model(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    assert load_model("adapter").task.encode({"text": "a"}, 0).ids == [2, 4, 3]
    make_tokenizer(end=False).save_pretrained(tmp_path / "adapter")
    assert load_model("adapter").task.encode({"text": "a"}, 0).ids == [2, 4]
    settings.write_text(json.dumps(content | {"base_model_name_or_path": None}))
    with pytest.raises(CheckpointError, match="does not name its base in 'base_model_name_or_pa"):
        load_model("adapter")


def test_adapters_that_do_not_fit(tmp_path: Path) -> None:
    base, model = llama(tmp_path / "base")
    adapt(model, IA3, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    state = load_file(path)
    name = "base_model.model.model.layers.0.self_attn.k_proj.ia3_l"
    save_file({k: v for k, v in state.items() if k != name}, path)
    with pytest.raises(DataError, match=f"lacks '{name}', which the adapter needs"):
        load_model(tmp_path / "adapter")
    save_file(state | {"base_model.model.other": torch.ones(2)}, path)
    with pytest.raises(DataError, match="'base_model.model.other' has no place in the base"):
        load_model(tmp_path / "adapter")
    save_file(state | {name: torch.ones(3, 1)}, path)
    with pytest.raises(DataError, match="adapter: peft cannot load it onto LlamaForCausalLM"):
        load_model(tmp_path / "adapter")
    save_file(state, path)
    with pytest.raises(DataError, match="made for causal_lm, and cannot do seq2seq"):
        load_model(tmp_path / "adapter", TaskFile(task="seq2seq"))
    (tmp_path / "adapter" / "model.safetensors").write_bytes(
        (base / "model.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match="holds both a model and an adapter"):
        load_model(tmp_path / "adapter")


def test_prompts_are_refused(tmp_path: Path) -> None:
    _, model = llama(tmp_path / "base")
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="PROMPT_TUNING; expected LORA or IA3"):
        load_model(tmp_path / "adapter")


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["query"], r=2, task_type="SEQ_CLS"),
        LoraConfig(target_modules=["query"], r=2, bias="all"),
        IA3Config(target_modules=["query"], feedforward_modules=[], task_type="SEQ_CLS"),
    ],
)
def test_a_head_that_is_given_wins(config: Any, tmp_path: Path) -> None:
    base = save(
        BertForSequenceClassification(bert_config(num_labels=3)),
        tmp_path / "base",
        make_tokenizer(),
    )
    adapt(BertForSequenceClassification.from_pretrained(base), config, tmp_path / "adapter")
    head = {"classifier.weight": torch.zeros(3, 16), "classifier.bias": torch.tensor([0.0, 0, 5])}
    save_file(head, tmp_path / "head.safetensors")
    loaded = load_model(tmp_path / "adapter", head=tmp_path / "head.safetensors")
    logits = loaded.model(input_ids=torch.tensor([[2, 4, 5, 3]])).logits
    assert torch.equal(logits, torch.tensor([[0.0, 0, 5]]))
