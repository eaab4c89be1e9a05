"""A merged model is used as its parts were: the right head, the classes' names, the tokenizer."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import bert_config, llama_config, make_tokenizer, save, vit_config, write_rows
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    ViTForImageClassification,
    ViTImageProcessor,
    pipeline,
)

import matsmerge
from matsmerge.errors import CheckpointError, DataError, OutputError
from matsmerge.tasks.loaded_model import load_model

LABELS = {"mood": ["sad", "glad"], "topic": ["sport", "trade", "art"]}
TEXT = "a b c d"


def merge(models: dict[str, Path], base: Path | None, out: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes on heads
        matsmerge.merge(models, base, options.pop("method", "average"), out=out, **options)
    return out


def with_labels(names: list[str], **options: Any) -> Any:
    return bert_config(
        id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}, **options
    )


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder, two classifiers of it with named classes, and their average."""
    folder = tmp_path_factory.mktemp("family")
    save(BertModel(bert_config()), folder / "base", make_tokenizer())
    for seed, (name, labels) in enumerate(LABELS.items()):
        model = BertForSequenceClassification(with_labels(labels))
        save(model, folder / name, make_tokenizer(), seed=seed + 1)
    merge({name: folder / name for name in LABELS}, folder / "base", folder / "merged")
    return folder


def expected_logits(family: Path, name: str) -> Tensor:
    """The mean of the encoders under a model's own head, put together by hand."""
    own = BertForSequenceClassification.from_pretrained(family / name).eval()
    states = [load_file(family / n / "model.safetensors") for n in LABELS]
    encoder = {n: (states[0][n] + states[1][n]) / 2 for n in states[0] if n.startswith("bert.")}
    own.load_state_dict(encoder, strict=False)
    logits: Tensor = own(**make_tokenizer()(TEXT, return_tensors="pt")).logits
    return logits


@pytest.mark.parametrize("name", LABELS)
def test_a_merged_classifier_with_each_head(family: Path, name: str) -> None:
    model = matsmerge.load(family / "merged", task=name)
    assert isinstance(model, BertForSequenceClassification)
    assert not model.training
    assert list(model.config.id2label.values()) == LABELS[name]
    inputs = model.tokenizer(TEXT, return_tensors="pt")
    expected = expected_logits(family, name)
    torch.testing.assert_close(model(**inputs).logits, expected)
    said = pipeline("text-classification", model=model, tokenizer=model.tokenizer)(TEXT)
    assert said[0]["label"] == LABELS[name][int(expected.argmax())]


def test_an_export_needs_nothing_but_transformers(family: Path, tmp_path: Path) -> None:
    folder = matsmerge.export(family / "merged", tmp_path / "alone", task="topic")
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    assert list(model.config.id2label.values()) == LABELS["topic"]
    inputs = make_tokenizer()(TEXT, return_tensors="pt")
    expected = expected_logits(family, "topic")
    torch.testing.assert_close(model(**inputs).logits, expected)
    said = pipeline("text-classification", model=str(folder))(TEXT)
    assert said[0]["label"] == LABELS["topic"][int(expected.argmax())]
    with pytest.raises(OutputError, match="exists already"):
        matsmerge.export(family / "merged", folder, task="mood")
    matsmerge.export(family / "merged", folder, task="mood", overwrite=True)
    assert json.loads((folder / "config.json").read_text())["id2label"]["1"] == "glad"
    with pytest.raises(OutputError, match="holds no export of ours"):
        matsmerge.export(family / "merged", family / "mood", task="mood", overwrite=True)
    with pytest.raises(OutputError, match="overlaps with the input"):
        matsmerge.export(family / "merged", family / "merged" / "x", task="mood")


def test_which_head(family: Path) -> None:
    with pytest.raises(DataError, match="has a head for each of mood, topic; say for which task: "):
        matsmerge.load(family / "merged")
    with pytest.raises(DataError, match="none for the task 'topics'; did you mean 'topic'"):
        matsmerge.load(family / "merged", task="topics")
    with pytest.raises(DataError, match="has no heads/ to choose 'mood' from"):
        matsmerge.load(family / "mood", task="mood")
    with pytest.raises(DataError, match="either a device or a device_map"):
        matsmerge.load(family / "mood", device="cpu", device_map="auto")


def test_a_head_knows_its_task_and_its_classes(family: Path) -> None:
    """The base is an encoder that does not say what it is for; the head does."""
    head = family / "merged" / "heads" / "mood.safetensors"
    loaded = load_model(family / "merged", head=head)
    assert loaded.task.kind == "sequence_classification"
    assert loaded.task.encode({"text": "a", "label": "glad"}, 0).label == 1


def test_matched_heads_keep_their_names(family: Path, tmp_path: Path) -> None:
    data = []
    for name in LABELS:
        write_rows(tmp_path / f"{name}.jsonl", [{"text": text} for text in ("a b", "c d e", "f")])
        data.append(tmp_path / f"{name}.jsonl")
    models = {name: family / name for name in LABELS}
    merged = merge(models, family / "base", tmp_path / "m", match_heads=True, data=data)
    assert matsmerge.load(merged, task="topic").config.label2id == {
        "sport": 0, "trade": 1, "art": 2,
    }  # fmt: skip


def test_names_of_classes_from_the_task(tmp_path: Path) -> None:
    """Where a model's configuration has no names, those of its task's data are taken."""
    save(BertModel(bert_config()), tmp_path / "base", make_tokenizer())
    data = []
    for seed, (name, labels) in enumerate(LABELS.items()):
        model = BertForSequenceClassification(bert_config(num_labels=len(labels)))
        save(model, tmp_path / name, make_tokenizer(), seed=seed + 1)
        write_rows(tmp_path / f"{name}.jsonl", [{"text": text} for text in ("a b", "c d e", "f")])
        task = {"task": "sequence_classification", "data": f"{name}.jsonl", "labels": labels}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))
        data.append(tmp_path / f"{name}.yaml")
    models = {name: tmp_path / name for name in LABELS}
    plain = merge(models, tmp_path / "base", tmp_path / "plain")
    assert matsmerge.load(plain, task="mood").config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
    named = merge(models, tmp_path / "base", tmp_path / "named", match_heads=True, data=data)
    assert matsmerge.load(named, task="mood").config.id2label == {0: "sad", 1: "glad"}


def test_heads_of_no_task_of_ours(tmp_path: Path) -> None:
    """Regression, and answers to questions: classes of transformers that nothing else knows."""
    save(BertModel(bert_config()), tmp_path / "base", make_tokenizer())
    config = bert_config(num_labels=1, problem_type="regression")
    save(BertForSequenceClassification(config), tmp_path / "score", make_tokenizer(), seed=1)
    save(BertForQuestionAnswering(bert_config()), tmp_path / "answer", make_tokenizer(), seed=2)
    models = {name: tmp_path / name for name in ("score", "answer")}
    merged = merge(
        models,
        tmp_path / "base",
        tmp_path / "m",
        heads=["*pooler*", "classifier.*", "qa_outputs.*"],
    )
    score = matsmerge.load(merged, task="score")
    assert score.config.problem_type == "regression"
    own = load_file(tmp_path / "score" / "model.safetensors")
    assert torch.equal(score.classifier.weight, own["classifier.weight"])
    assert torch.equal(score.bert.pooler.dense.weight, own["bert.pooler.dense.weight"])
    answer = matsmerge.load(merged, task="answer")
    assert isinstance(answer, BertForQuestionAnswering)
    own = load_file(tmp_path / "answer" / "model.safetensors")
    assert torch.equal(answer.qa_outputs.weight, own["qa_outputs.weight"])


def test_images(tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "pets", "cars")):
        model = ViTForImageClassification(vit_config(num_labels=2 + seed))
        save(model, tmp_path / name, ViTImageProcessor(size=8), seed=seed)
    models = {name: tmp_path / name for name in ("pets", "cars")}
    merged = merge(models, tmp_path / "base", tmp_path / "m", heads=["classifier.*"])
    model = matsmerge.load(merged, task="cars")
    assert model.config.num_labels == 4
    assert type(model.image_processor).__name__.startswith("ViTImageProcessor")


def test_a_language_model_writes_with_its_cache(tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "one", "two")):
        save(LlamaForCausalLM(llama_config()), tmp_path / name, make_tokenizer(), seed=seed)
    merged = merge({n: tmp_path / n for n in ("one", "two")}, tmp_path / "base", tmp_path / "m")
    model = matsmerge.load(merged)
    assert isinstance(model, LlamaForCausalLM)
    assert model.config.use_cache
    assert matsmerge.load(merged, dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_adapters_are_folded_under_each_head(kind: str, tmp_path: Path) -> None:
    """Against PEFT: each adapter with the head it brought, and the merge of both by hand."""
    save(BertModel(bert_config()), tmp_path / "base", make_tokenizer())
    modules: dict[str, Any] = {"target_modules": ["query", "value"]}
    settings = (
        LoraConfig(r=2, **modules)
        if kind == "lora"
        else IA3Config(feedforward_modules=[], **modules)
    )
    settings.task_type = "SEQ_CLS"
    for seed, (name, labels) in enumerate(LABELS.items()):
        model = BertForSequenceClassification.from_pretrained(
            tmp_path / "base", num_labels=len(labels)
        )
        adapted = get_peft_model(model, settings)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        adapted.save_pretrained(tmp_path / name)
        training = {"tasks": [{"name": name, "labels": labels}]}
        (tmp_path / name / "training.json").write_text(json.dumps(training))
    merged = merge({n: tmp_path / n for n in LABELS}, tmp_path / "base", tmp_path / "m")
    assert (merged / "adapter_config.json").exists()
    model = matsmerge.load(merged, task="topic")
    assert type(model) is BertForSequenceClassification
    assert list(model.config.id2label.values()) == LABELS["topic"]
    stored = load_file(merged / "heads" / "topic.safetensors")
    head = next(value for name, value in stored.items() if name.endswith("classifier.weight"))
    assert torch.equal(model.classifier.weight, head)
    dense = merge(
        {n: tmp_path / n for n in LABELS}, tmp_path / "base", tmp_path / "d", output="dense"
    )
    expected = matsmerge.load(dense, task="topic")
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], parameter)
    alone = matsmerge.export(merged, tmp_path / "alone", task="topic")
    read: Any = AutoModelForSequenceClassification.from_pretrained(alone)
    assert torch.equal(read.bert.encoder.layer[0].attention.self.query.weight,
                       model.bert.encoder.layer[0].attention.self.query.weight)  # fmt: skip


def test_damaged_records(family: Path, tmp_path: Path) -> None:
    head = family / "merged" / "heads" / "mood.safetensors"
    damaged = tmp_path / "mood.safetensors"
    save_file(load_file(head), damaged, {"head": '{"labels": 3}'})
    with pytest.raises(DataError, match="its metadata 'head'"):
        load_model(family / "merged", head=damaged)


def test_a_damaged_configuration_is_refused_before_the_merge(tmp_path: Path) -> None:
    save(BertModel(bert_config()), tmp_path / "base", make_tokenizer())
    for seed, (name, labels) in enumerate(LABELS.items()):
        save(BertForSequenceClassification(with_labels(labels)), tmp_path / name, seed=seed)
    config = tmp_path / "mood" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": 3}))
    with pytest.raises((CheckpointError, DataError), match="architect"):
        matsmerge.plan({n: tmp_path / n for n in LABELS}, tmp_path / "base")
