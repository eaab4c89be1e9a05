"""Joint training, and one task after another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import (
    bert_config,
    make_tokenizer,
    save,
    t5_config,
    write_rows,
)
from training_cases import (
    QUICK,
    SPLITS,
    Interrupting,
    accuracy,
    assert_same,
    choice_task,
    rule_task,
    sentences,
    three_classes,
    weights,
)
from transformers import (
    BertModel,
    RobertaConfig,
    RobertaModel,
    T5ForConditionalGeneration,
)

from matsmerge.lab.training.training_run import train


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(BertModel(bert_config()), tmp_path / "base", make_tokenizer())


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    return rule_task(tmp_path)


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
