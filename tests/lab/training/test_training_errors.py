"""What is wrong is said before anything is trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import (
    bert_config,
    make_tokenizer,
    save,
    write_rows,
)
from training_cases import rule_task
from transformers import (
    BertModel,
)

from matsmerge.errors import MatsError
from matsmerge.lab.training.training_run import train


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(BertModel(bert_config()), tmp_path / "base", make_tokenizer())


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    return rule_task(tmp_path)


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
