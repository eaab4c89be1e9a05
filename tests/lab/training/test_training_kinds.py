"""Training for every kind of task, full models and adapters; jointly, and one task after another."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    bert_config,
    clip_config,
    llama_config,
    make_tokenizer,
    save,
    t5_config,
    vit_config,
    write_rows,
)
from training_cases import (
    QUICK,
    SPLITS,
    Interrupting,
    accuracy,
    assert_same,
    choice_task,
    images_task,
    rule_task,
    sentences,
    three_classes,
    weights,
)
from transformers import (
    BertForTokenClassification,
    BertModel,
    CLIPModel,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaModel,
    T5ForConditionalGeneration,
    ViTModel,
)

from matsmerge.errors import DataError
from matsmerge.lab.training.training_run import train
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task import encode_all
from matsmerge.tasks.task_file import read_task_file


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(BertModel(bert_config()), tmp_path / "base", make_tokenizer())


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    return rule_task(tmp_path)


def test_ia3_on_t5(tmp_path: Path) -> None:
    base = save(T5ForConditionalGeneration(t5_config()), tmp_path / "base", make_tokenizer())
    task = choice_task(tmp_path)
    trained = train(
        base, task, tmp_path / "out", adapter="ia3", eval_every=20, max_steps=40,
        learning_rate=3e-2,
    )  # fmt: skip
    config = json.loads((trained.folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert config["peft_type"] == "IA3"
    assert sorted(config["target_modules"]) == ["k", "v", "wo"]
    stored = weights(trained.folder)
    assert {name.rpartition(".")[2] for name in stored} == {"ia3_l"}
    assert trained.score == pytest.approx(accuracy(trained.folder, task))
    first, last = (trained.manifest["checkpoints"][i]["training_loss"] for i in (0, -1))
    assert last < first
    # Trained on as it is, and where it stood.
    again = train(trained.folder, task, tmp_path / "again", max_steps=1, learning_rate=1e-12)
    assert again.manifest["adapter"] == "ia3"
    for name, values in weights(again.folder).items():
        torch.testing.assert_close(values, stored[name])
    config = json.loads((again.folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)


def test_lora_on_llama(tmp_path: Path) -> None:
    base = save(LlamaForCausalLM(llama_config()), tmp_path / "base", make_tokenizer())
    rows = [{"input": " ".join(w), "target": w[-1] + " " + w[-1]} for w in sentences(200)]
    write_rows(tmp_path / "d.jsonl", rows)
    (tmp_path / "last.yaml").write_text(f"data: d.jsonl\n{SPLITS}")
    trained = train(
        base, tmp_path / "last.yaml", tmp_path / "out", adapter="lora", rank=4, alpha=4,
        target_modules=["q_proj", "down_proj"], eval_every=20, max_steps=60, learning_rate=1e-2,
    )  # fmt: skip
    config = json.loads((trained.folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 4, "CAUSAL_LM")
    scores = [c["score"] for c in trained.manifest["checkpoints"]]
    assert scores[-1] > scores[0]
    file = read_task_file(tmp_path / "last.yaml")
    loaded = load_model(trained.folder)
    examples = encode_all(loaded.task, read_split(file, "validation"))
    with torch.no_grad():
        losses = [
            loaded.task.predict(loaded.model, loaded.task.collate([e])).losses("mean")
            for e in examples
        ]
    assert trained.score == pytest.approx(-float(torch.cat(losses).mean()), abs=1e-5)


def test_lora_with_a_head(bert: Path, rule: Path, tmp_path: Path) -> None:
    trained = train(bert, rule, tmp_path / "out", adapter="lora", **QUICK | {"learning_rate": 2e-2})
    assert {n for n in weights(trained.folder) if "lora" not in n} == {
        "base_model.model.classifier.weight", "base_model.model.classifier.bias"
    }  # fmt: skip
    assert trained.score is not None
    assert trained.score > 0.85
    assert accuracy(trained.folder, rule) == pytest.approx(trained.score)
    # The same classes keep the head, others get a fresh one.
    kept = train(trained.folder, rule, tmp_path / "kept", max_steps=1, learning_rate=1e-12)
    assert kept.score == trained.score
    three = three_classes(tmp_path)
    fresh = train(trained.folder, three, tmp_path / "fresh", max_steps=1, learning_rate=1e-12)
    stored, before = weights(fresh.folder), weights(trained.folder)
    assert stored["base_model.model.classifier.weight"].shape == (3, 16)
    for name, values in before.items():
        if "lora" in name:
            torch.testing.assert_close(values, stored[name])


@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_images(adapter: str, tmp_path: Path) -> None:
    base = save(ViTModel(vit_config()), tmp_path / "base")
    task = images_task(tmp_path)
    targets = ["q_proj", "v_proj"] if adapter == "lora" else None
    trained = train(base, task, tmp_path / "out", adapter=adapter, target_modules=targets, **QUICK)
    assert trained.score is not None
    assert trained.score > 0.9
    assert accuracy(trained.folder, task) == pytest.approx(trained.score)


def test_a_stored_head_on_clip(tmp_path: Path) -> None:
    base = save(CLIPModel(clip_config()), tmp_path / "base")
    task = images_task(tmp_path)
    head = torch.nn.functional.normalize(
        torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    )
    save_file({"weight": head}, tmp_path / "head.safetensors")
    task.write_text(task.read_text() + "head: head.safetensors\n")
    trained = train(
        base, task, tmp_path / "out", freeze=["head.*", "scale.*"], **QUICK | {"max_steps": 60}
    )
    before, after = load_file(base / "model.safetensors"), weights(trained.folder)
    assert before.keys() == after.keys()
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed
    assert all(n.startswith(("vision_model.", "visual_projection.")) for n in changed)
    stored = trained.folder / "heads" / "images.safetensors"
    assert torch.equal(load_file(stored)["weight"], head)
    assert trained.score is not None
    assert trained.score > 0.6
    assert accuracy(trained.folder, task, head=stored) == pytest.approx(trained.score)


def colour_task(folder: Path, name: str, labels: list[str], more: str = "") -> Path:
    """Which of three colours an image has most of, or which of two."""
    g = torch.Generator().manual_seed(len(labels))
    rows = []
    for i in range(90):
        image = torch.randint(0, 100, (8, 8, 3), generator=g)
        image[..., i % len(labels)] += 150
        rows.append({"image": image.tolist(), "label": labels[i % len(labels)]})
    write_rows(folder / f"{name}.jsonl", rows)
    (folder / f"{name}.yaml").write_text(
        f"task: image_classification\ndata: {name}.jsonl\n{SPLITS}labels: {labels}\n{more}"
    )
    return folder / f"{name}.yaml"


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return save(CLIPModel(clip_config()), tmp_path / "base", make_tokenizer())


def test_several_tasks_on_clip_with_heads_made_of_text(clip: Path, tmp_path: Path) -> None:
    made = "template: ['i {label}', '{label} j']\n"
    tasks = [
        colour_task(tmp_path, "three", ["a", "b c", "d"], made),
        colour_task(tmp_path, "two", ["e f", "g"], made),
    ]
    options = QUICK | {"max_steps": 60, "freeze": ["head.*", "scale.*"]}
    trained = train(clip, tasks, tmp_path / "out", **options)
    before, after = load_file(clip / "model.safetensors"), weights(trained.folder)
    assert before.keys() == after.keys()
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert any(n.startswith("vision_model.encoder") for n in changed)
    assert all(n.startswith(("vision_model.", "visual_projection.")) for n in changed)
    kept = trained.manifest["checkpoints"][trained.manifest["kept"] // QUICK["eval_every"] - 1]
    for task in tasks:
        stored = trained.folder / "heads" / f"{task.stem}.safetensors"
        own = load_model(clip, read_task_file(task)).model.get_parameter("head.weight")
        assert torch.equal(load_file(stored)["weight"], own)
        found = accuracy(trained.folder, task, head=stored)
        assert found == pytest.approx(kept["scores"][task.stem])
        assert found > 0.6


def test_given_and_fresh_heads_do_not_go_together(clip: Path, tmp_path: Path) -> None:
    made = colour_task(tmp_path, "made", ["a", "b"], "template: i {label}\n")
    fresh = colour_task(tmp_path, "fresh", ["a", "b"])
    with pytest.raises(DataError, match="fresh: has a fresh head, others a given one"):
        train(clip, [made, fresh], tmp_path / "out")
    for name, size in (("narrow", 8), ("wide", 16)):
        save_file({"weight": torch.randn(2, size)}, tmp_path / f"{name}.safetensors")
    tasks = [
        colour_task(tmp_path, name, ["a", "b"], f"head: {name}.safetensors\n")
        for name in ("narrow", "wide")
    ]
    with pytest.raises(DataError, match="one linear layer on the same output of the encoder"):
        train(clip, tasks, tmp_path / "out")


def test_words(tmp_path: Path) -> None:
    base = save(
        BertForTokenClassification(bert_config(num_labels=5)), tmp_path / "base", make_tokenizer()
    )
    rows = [{"tokens": w, "labels": ["X" if c <= "d" else "O" for c in w]} for w in sentences(200)]
    write_rows(tmp_path / "words.jsonl", rows)
    (tmp_path / "words.yaml").write_text(f"data: words.jsonl\n{SPLITS}")
    trained = train(base, tmp_path / "words.yaml", tmp_path / "out", **QUICK)
    assert trained.manifest["tasks"][0]["labels"] == ["O", "X"]
    assert any("labels: " in note for note in trained.manifest["notes"])
    assert trained.score is not None
    assert trained.score > 0.9


def test_a_decoder_classifies(rule: Path, tmp_path: Path) -> None:
    base = save(LlamaForCausalLM(llama_config()), tmp_path / "base", make_tokenizer())
    trained = train(base, rule, tmp_path / "out", **QUICK | {"max_steps": 40})
    assert accuracy(trained.folder, rule) == pytest.approx(trained.score)
    config = json.loads((trained.folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["use_cache"] is True


def test_several_tasks_with_a_head_each(bert: Path, tmp_path: Path) -> None:
    tasks = [rule_task(tmp_path, 150, "first"), rule_task(tmp_path, 60, "second", ("efgh", "abcd")),
             three_classes(tmp_path)]  # fmt: skip
    trained = train(bert, tasks, tmp_path / "out", **QUICK | {"max_steps": 80})
    scores = next(
        c for c in trained.manifest["checkpoints"] if c["step"] == trained.manifest["kept"]
    )
    assert scores["score"] == pytest.approx(sum(scores["scores"].values()) / 3)
    assert min(scores["scores"].values()) > 0.9
    heads = {p.stem: load_file(p) for p in (trained.folder / "heads").iterdir()}
    assert {n: tuple(h["classifier.weight"].shape) for n, h in heads.items()} == {
        "first": (2, 16), "second": (2, 16), "three": (3, 16)
    }  # fmt: skip
    assert all(set(h) == {"classifier.weight", "classifier.bias"} for h in heads.values())
    assert weights(trained.folder).keys() == load_file(bert / "model.safetensors").keys()
    for task in tasks:
        head = trained.folder / "heads" / f"{task.stem}.safetensors"
        found = accuracy(trained.folder, task, head=head)
        assert found == pytest.approx(scores["scores"][task.stem])


def test_several_tasks_are_continued(bert: Path, tmp_path: Path) -> None:
    tasks = [rule_task(tmp_path, 100, "first"), three_classes(tmp_path)]
    options: dict[str, Any] = {"max_steps": 12, "eval_every": 4, "equal": True}
    whole = train(bert, tasks, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        train(bert, tasks, tmp_path / "out", progress=Interrupting(10), **options)
    parts = train(bert, tasks, tmp_path / "out", resume=True, **options)
    assert_same(weights(whole.folder), weights(parts.folder))
    for head in (whole.folder / "heads").iterdir():
        assert_same(load_file(head), load_file(parts.folder / "heads" / head.name))


def test_several_tasks_answered_with_text(tmp_path: Path) -> None:
    base = save(T5ForConditionalGeneration(t5_config()), tmp_path / "base", make_tokenizer())
    rows = [{"input": " ".join(w), "target": w[0]} for w in sentences(60)]
    write_rows(tmp_path / "echo.jsonl", rows)
    (tmp_path / "echo.yaml").write_text(f"data: echo.jsonl\n{SPLITS}")
    tasks = [choice_task(tmp_path, num=80), tmp_path / "echo.yaml"]
    trained = train(base, tasks, tmp_path / "out", max_steps=4, eval_every=2)
    assert [t["measure"] for t in trained.manifest["tasks"]] == ["accuracy", "negative loss"]
    kept = trained.manifest["checkpoints"][trained.manifest["kept"] // 2 - 1]["scores"]
    assert accuracy(trained.folder, tasks[0]) == pytest.approx(kept["choice"])


def test_one_task_after_another(bert: Path, rule: Path, tmp_path: Path) -> None:
    first = train(bert, three_classes(tmp_path), tmp_path / "a", max_steps=5)
    second = train(first.folder, rule, tmp_path / "b", max_steps=2, learning_rate=1e-12)
    a, b = weights(first.folder), weights(second.folder)
    assert b["classifier.weight"].shape == (2, 16)
    for name in a:
        if not name.startswith("classifier"):
            torch.testing.assert_close(a[name], b[name])
    assert any("its classes are not the task's" in note for note in second.manifest["notes"])
    # The same classes keep their head, unless a fresh one is asked for.
    same = train(second.folder, rule, tmp_path / "c", max_steps=1, learning_rate=1e-12)
    torch.testing.assert_close(weights(same.folder)["classifier.weight"], b["classifier.weight"])
    fresh = train(
        second.folder, rule, tmp_path / "d", max_steps=1, learning_rate=1e-12, fresh_head=True,
        seed=5,
    )  # fmt: skip
    other = weights(fresh.folder)["classifier.weight"]
    assert not torch.allclose(other, b["classifier.weight"])
    assert 0.005 < float(other.std()) < 0.04  # as BERT's are made


def test_all_of_a_larger_head_is_fresh(rule: Path, tmp_path: Path) -> None:
    config = RobertaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=24, max_position_embeddings=34, pad_token_id=0,
    )  # fmt: skip
    base = save(RobertaModel(config, add_pooling_layer=False), tmp_path / "base", make_tokenizer())
    first = train(base, rule, tmp_path / "a", max_steps=1, learning_rate=1e-12)
    second = train(
        first.folder, three_classes(tmp_path), tmp_path / "b", max_steps=1, learning_rate=1e-12,
        seed=3,
    )  # fmt: skip
    a, b = weights(first.folder), weights(second.folder)
    assert not torch.allclose(a["classifier.dense.weight"], b["classifier.dense.weight"])
    lora = train(base, rule, tmp_path / "c", adapter="lora", max_steps=1)
    assert "base_model.model.classifier.dense.weight" in weights(lora.folder)
