"""Training a tiny model: it learns, and a run can be repeated and continued.

What is wrong is said before anything is trained.
"""

import json
from collections.abc import Callable
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
    Interrupting,
    State,
    accuracy,
    assert_same,
    rule_task,
    sentences,
    weights,
)
from transformers import (
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    BertModel,
    T5ForConditionalGeneration,
)

from matsmerge.data.rows import read_data
from matsmerge.errors import MatsError, NonFiniteError
from matsmerge.lab.training.prepared_training import prepare_training
from matsmerge.lab.training.run_folder import RunFolder
from matsmerge.lab.training.trainee import TaskExamples
from matsmerge.lab.training.training_options import make_training_options
from matsmerge.lab.training.training_run import run_training, train
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.prediction import Reduction
from matsmerge.tasks.task import encode_all


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(BertModel(bert_config()), tmp_path / "base", make_tokenizer())


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    return rule_task(tmp_path)


def test_a_rule_is_learnt(bert: Path, rule: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned" / "rule"
    trained = train(bert, rule, out, **QUICK)
    assert trained.score is not None
    assert trained.score > 0.9
    assert accuracy(out, rule) == pytest.approx(trained.score)
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert isinstance(model, BertForSequenceClassification)
    assert model.config.id2label == {0: "0", 1: "1"}
    manifest = json.loads((out / "training.json").read_text())
    assert manifest == trained.manifest
    assert [c["step"] for c in manifest["checkpoints"]][:2] == [15, 30]
    assert manifest["tasks"][0]["train"]["num_examples"] == 150
    assert manifest["tasks"][0]["validation"]["data"] == "rule.jsonl (validation)"
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "training.json",
    ]  # fmt: skip
    assert sorted(p.name for p in out.parent.iterdir()) == ["rule"]
    config = json.loads((out / "config.json").read_text())
    assert config["use_cache"] == json.loads((bert / "config.json").read_text())["use_cache"]


def test_the_same_seed_gives_the_same_bits(bert: Path, rule: Path, tmp_path: Path) -> None:
    options = QUICK | {"max_steps": 25, "group_by_length": True}
    runs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(ord(name))  # what came before does not matter
        runs.append(train(bert, rule, tmp_path / name, seed=seed, **options))
    a, b, c = (weights(run.folder) for run in runs)
    assert_same(a, b)
    assert runs[0].manifest == runs[1].manifest
    assert any(not torch.equal(a[name], c[name]) for name in a)


@pytest.mark.parametrize(
    ("adapter", "batch_size"),
    [pytest.param("full", 16, marks=pytest.mark.long), ("full", 30), ("lora", 16)],
)  # of 150 examples: 10 batches end in the middle of an epoch, or with it
def test_a_continued_run_ends_as_an_uninterrupted_one(
    adapter: str, batch_size: int, bert: Path, rule: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "adapter": adapter, "max_steps": 25, "eval_every": 10, "batch_size": batch_size,
        "learning_rate": 1e-3,
    }  # fmt: skip
    whole = train(bert, rule, tmp_path / "whole", **options)
    out = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        train(bert, rule, out, progress=Interrupting(7), **options)
    assert not (tmp_path / ".parts.partial").exists()  # nothing to continue from
    with pytest.raises(KeyboardInterrupt):
        train(bert, rule, out, progress=Interrupting(13), **options)
    assert not out.exists()
    with pytest.raises(MatsError, match="--resume"):
        train(bert, rule, out, **options)
    with pytest.raises(MatsError, match="max_grad_norm was 1.0 and is 2.0"):
        train(bert, rule, out, resume=True, max_grad_norm=2.0, **options)
    watching = Interrupting(-1)
    continued = train(bert, rule, out, resume=True, progress=watching, **options)
    assert watching.first == 10
    assert_same(weights(whole.folder), weights(continued.folder))
    assert continued.manifest == whole.manifest
    assert not (tmp_path / ".parts.partial").exists()


def test_early_stopping_keeps_the_best(
    bert: Path, rule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.1, 0.3, 0.7, 0.2, 0.7, 0.6, 0.9])
    seen: list[State] = []

    def score(self: TaskExamples, *_: Any) -> float:
        seen.append({n: p.detach().clone() for n, p in self.model.named_parameters()})
        return next(scores)

    monkeypatch.setattr(TaskExamples, "score", score)
    options: dict[str, Any] = {"eval_every": 2, "patience": 3, "max_steps": 50}
    trained = train(bert, rule, tmp_path / "out", **options)
    assert [c["score"] for c in trained.manifest["checkpoints"]] == [0.1, 0.3, 0.7, 0.2, 0.7, 0.6]
    assert trained.manifest["kept"] == 6
    assert trained.manifest["stopped_early"]
    assert trained.score == 0.7
    assert_same(weights(trained.folder), seen[2])


def test_stopped_between_its_last_batch_and_the_end(
    bert: Path, rule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = QUICK | {"patience": 1, "learning_rate": 1e-6, "eval_every": 3}
    whole = train(bert, rule, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("matsmerge.lab.training.training_run.copy_processor", fail)
        with pytest.raises(MatsError, match="No space left.*--resume"):
            train(bert, rule, tmp_path / "out", **options)
    continued = train(bert, rule, tmp_path / "out", resume=True, **options)
    assert continued.manifest == whole.manifest
    assert_same(weights(whole.folder), weights(continued.folder))


def test_a_loss_that_is_not_finite(bert: Path, rule: Path, tmp_path: Path) -> None:
    class Poisoning(Interrupting):
        def advance(self, amount: int, doing: str | None = None) -> None:
            super().advance(amount, doing)
            if self.number == 13:
                with torch.no_grad():
                    model.get_parameter("classifier.weight").fill_(torch.nan)

    prepared = prepare_training(bert, [rule], make_training_options(max_steps=20, eval_every=5))
    model = prepared.start.model
    with pytest.raises(
        NonFiniteError, match="batch 14: the loss is not finite for 32 of 32.*rule row"
    ):
        run_training(prepared, RunFolder(tmp_path / "out"), progress=Poisoning(0))
    watching = Interrupting(-1)
    trained = train(
        bert, rule, tmp_path / "out", resume=True, progress=watching, max_steps=20, eval_every=5,
        learning_rate=1e-5,
    )  # fmt: skip
    assert watching.first == 10
    rates = [c["learning_rate"] for c in trained.manifest["checkpoints"]]
    assert rates == [1e-4, 1e-4, 1e-5, 1e-5]


def test_without_validation(bert: Path, tmp_path: Path) -> None:
    rule_task(tmp_path)
    (tmp_path / "whole.yaml").write_text("task: sequence_classification\ndata: rule.jsonl\n")
    with pytest.raises(MatsError, match=r"no split 'validation'.*splits: \{train: 0.8"):
        train(bert, tmp_path / "whole.yaml", tmp_path / "out", max_steps=5)
    (tmp_path / "two.yaml").write_text(
        "task: sequence_classification\ndata: {train: rule.jsonl, test: rule.jsonl}\n"
    )
    with pytest.raises(MatsError, match="(?s)'validation', only train, test.*--no-validation"):
        train(bert, tmp_path / "two.yaml", tmp_path / "out", max_steps=5)
    trained = train(
        bert, tmp_path / "whole.yaml", tmp_path / "out", epochs=1.5, batch_size=50, validate=False
    )
    assert trained.manifest["num_steps"] == trained.manifest["kept"] == 6
    assert trained.manifest["checkpoints"] == []
    assert not trained.manifest["stopped_early"]
    assert trained.score is None


@pytest.mark.parametrize("loss", ["sum", "mean"])
def test_the_gradient_is_that_of_the_plain_losses(
    loss: Reduction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one batch in two parts, against one example at a time."""
    base = save(
        T5ForConditionalGeneration(t5_config(dropout_rate=0.0)).double(), tmp_path / "base",
        make_tokenizer(),
    )  # fmt: skip
    rows = [{"input": " ".join(w), "target": " ".join(w[::-1][:3])} for w in sentences(8)]
    write_rows(tmp_path / "d.jsonl", rows)
    (tmp_path / "d.yaml").write_text("data: d.jsonl\n")
    gradients: list[torch.Tensor] = []

    def keep(self: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        gradients.extend(p.grad.clone() for g in self.param_groups for p in g["params"])

    monkeypatch.setattr(torch.optim.AdamW, "step", keep)
    trained = train(
        base, tmp_path / "d.yaml", tmp_path / "out", validate=False, max_steps=1, batch_size=4,
        accumulate=2, loss=loss, max_grad_norm=0,
    )  # fmt: skip
    assert_same(weights(trained.folder), load_file(base / "model.safetensors"))
    loaded = load_model(base)
    examples = encode_all(loaded.task, read_data(tmp_path / "d.jsonl"))
    for example in examples:
        said = loaded.task.predict(loaded.model, loaded.task.collate([example]))
        (said.losses(loss).sum() / len(examples)).backward()
    expected = {n: p.grad for n, p in loaded.model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(expected)
    # Trainer puts those that decay first, which nothing does here.
    for gradient in expected.values():
        assert any(
            g.shape == gradient.shape and torch.allclose(g, gradient, rtol=1e-9, atol=1e-13)
            for g in gradients
        )


def test_what_is_frozen_stays(bert: Path, rule: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(bert, rule, out, freeze=["*embeddings*", "bert.encoder.layer.0.*"], max_steps=3)
    before, after = load_file(bert / "model.safetensors"), weights(out)
    same = {n for n in before if torch.equal(before[n], after[f"bert.{n}"])}
    assert same == {n for n in before if "embeddings" in n or n.startswith("encoder.layer.0.")}


def test_bfloat16(bert: Path, rule: Path, tmp_path: Path) -> None:
    trained = train(bert, rule, tmp_path / "out", bf16=True, **QUICK)
    assert {t.dtype for t in weights(trained.folder).values()} == {torch.float32}
    assert trained.score is not None
    assert trained.score > 0.85
    other = train(bert, rule, tmp_path / "other", **QUICK)
    assert other.manifest["checkpoints"][0] != trained.manifest["checkpoints"][0]


def wrong_label(folder: Path, text: str) -> str:
    rows = [{"text": "a", "label": "xyz"[i % 3]} for i in range(12)]
    write_rows(folder / "wrong.jsonl", rows)
    return text.replace("rule.jsonl", "wrong.jsonl") + "labels: [x, y]\n"


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (wrong_label, {}, "label 'z' is no class of the model"),
        ("columns: {label: lable}\n", {}, "no column 'lable'.*did you mean 'label'"),
        ("columns: {text: txt}\n", {}, "no column 'txt'"),
        ("labels: [a, a]\n", {}, "at least two different names"),
        ("head: none.safetensors\n", {}, "none.safetensors"),
        ("", {"adapter": "lora", "target_modules": ["quary"]}, "no module 'quary'; did you mean 'query'"),
        ("", {"adapter": "prefix"}, "no adapter 'prefix'; there is full, lora, ia3"),
        ("", {"adapter": "ia3", "rank": 4}, "rank is an option of LoRA"),
        ("", {"max_steps": 3, "epochs": 2}, "either max_steps or epochs"),
        ("", {"batch_size": 0}, "batch_size: input should be greater"),
        ("", {"freeze": ["nothing.*"]}, "--freeze 'nothing.*': matches no parameter"),
        ("", {"freeze": ["*"]}, "nothing is left to train"),
        ("", {"learning": 1}, "unknown key 'learning'; did you mean 'learning_rate'"),
        ("", {"dtype": "float8"}, "no dtype 'float8'"),
        ("", {"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
    ],
)  # fmt: skip
def test_errors(
    change: str | Callable[[Path, str], str], options: dict[str, Any], message: str, bert: Path,
    rule: Path, tmp_path: Path,
) -> None:  # fmt: skip
    text = rule.read_text()
    rule.write_text(text + change if isinstance(change, str) else change(tmp_path, text))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(MatsError, match=f"(?s){message}"):
        train(bert, rule, tmp_path / "out", **options)
    assert sorted(tmp_path.iterdir()) == before


def test_errors_of_several_tasks(bert: Path, rule: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(MatsError, match="2 tasks have the name 'rule'"):
        train(bert, [rule, rule], out)
    with pytest.raises(MatsError, match="no such file"):
        train(bert, [rule, tmp_path / "none.yaml"], out)
    (tmp_path / "words.yaml").write_text(
        rule.read_text().replace("sequence_", "token_") + "columns: {labels: label}\n"
    )
    with pytest.raises(MatsError, match="cannot be trained in one model: rule"):
        train(bert, [rule, tmp_path / "words.yaml"], out)
    other = rule_task(tmp_path, 40, "other")
    with pytest.raises(MatsError, match="--adapter full"):
        train(bert, [rule, other], out, adapter="lora")
    rows = [{"text": "a", "label": "x y"}, {"text": "b", "label": "no"}] * 10
    write_rows(tmp_path / "other.jsonl", rows)
    with pytest.raises(MatsError, match=r'labels: \["no", "x y"\]'):
        train(bert, [rule, other], out)
    assert not out.exists()


def test_outputs_that_must_not_be_written(bert: Path, rule: Path, tmp_path: Path) -> None:
    with pytest.raises(MatsError, match="holds no training of ours"):
        train(bert, rule, bert, overwrite=True)
    with pytest.raises(MatsError, match="overlaps"):
        train(bert, rule, bert / "out")
    train(bert, rule, tmp_path / "out", max_steps=1)
    with pytest.raises(MatsError, match="--overwrite"):
        train(bert, rule, tmp_path / "out", max_steps=1)
    second = train(bert, rule, tmp_path / "out", max_steps=2, overwrite=True)
    assert second.manifest["num_steps"] == 2
    (tmp_path / "s.yaml").write_text("task: seq2seq\ndata: rule.jsonl\n")
    with pytest.raises(MatsError, match="no bert model for seq2seq"):
        train(bert, tmp_path / "s.yaml", tmp_path / "other", validate=False)
