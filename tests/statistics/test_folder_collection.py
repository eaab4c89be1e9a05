"""`matsmerge.collect` of folders and files, of what tokenizers return, and without a loss."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import bert_config, make_tokenizer, save, write_rows
from torch.nn.functional import cross_entropy
from transformers import BatchEncoding, BertForSequenceClassification

import matsmerge
from matsmerge.errors import RecipeError
from matsmerge.statistics.statistics import Statistics

Run = Callable[..., tuple[int, str, str]]

TEXTS = ["a b c", "d", "e f g h", "b a", "c c d a e"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier, its data, and a task file."""
    folder = tmp_path_factory.mktemp("collect")
    model = BertForSequenceClassification(bert_config(num_labels=3))
    save(model, folder / "model", make_tokenizer())
    rows = [{"sentence": text, "label": i % 3} for i, text in enumerate(TEXTS)]
    write_rows(folder / "rows.jsonl", rows)
    task = {"data": "rows.jsonl", "columns": {"text": "sentence"}}
    (folder / "task.yaml").write_text(json.dumps(task))
    return folder


def same(a: Statistics, b: Statistics) -> None:
    assert set(a.arrays.specs) == set(b.arrays.specs)
    for name in a.arrays.specs:
        torch.testing.assert_close(a.arrays[name], b.arrays[name])


def test_a_folder_and_a_task_file_are_as_on_the_command_line(place: Path, mats: Run) -> None:
    out = place / "by_command.safetensors"
    arguments = ("--task", place / "task.yaml", "--statistics", "kfac", "--num-examples", 4)
    code, said, err = mats("collect", place / "model", *arguments, "--out", out)
    assert code == 0, err
    assert "the model is right on" in said
    line = said.splitlines()[-1]
    assert line == (
        f"next: mats merge {place / 'model'} MODEL2 --base BASE --method mats_kfac "
        f"--statistics={out} --statistics=FILE2 --out merged"
    )
    written = place / "by_python.safetensors"
    found = matsmerge.collect(
        place / "model", place / "task.yaml", "kfac", num_examples=4, out=written, device="cpu"
    )
    assert found.header.num_examples == 4
    same(matsmerge.open_statistics(written), matsmerge.open_statistics(out))


def batches(form: type) -> list[Any]:
    encoded = make_tokenizer()(TEXTS, padding=True, return_tensors="pt")
    content = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    content["labels"] = torch.tensor([i % 3 for i in range(len(TEXTS))])
    return [form({name: value[part] for name, value in content.items()})
            for part in (slice(0, 3), slice(3, 5))]  # fmt: skip


def loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


@pytest.mark.parametrize("form", [dict, BatchEncoding])
def test_batches_with_labels_need_no_loss(place: Path, form: type) -> None:
    model = BertForSequenceClassification.from_pretrained(place / "model").eval()
    expected = matsmerge.collect(model, batches(dict), "kfac,fisher", loss=loss)
    found = matsmerge.collect(model, iter(batches(form)), "kfac,fisher")
    assert found.header.num_examples == len(TEXTS)
    same(found, expected)
    same(matsmerge.collect(place / "model", batches(form), "kfac,fisher"), expected)


def test_problems(place: Path) -> None:
    model = BertForSequenceClassification(bert_config(num_labels=3))
    with pytest.raises(RecipeError, match="needs the model's folder"):
        matsmerge.collect(model, place / "task.yaml")
    with pytest.raises(RecipeError, match="leave out loss="):
        matsmerge.collect(place / "model", place / "task.yaml", loss=loss)
    with pytest.raises(RecipeError, match="num_examples"):
        matsmerge.collect(model, batches(dict), num_examples=3)
    unlabelled = [{"input_ids": batch["input_ids"]} for batch in batches(dict)]
    with pytest.raises(RecipeError, match="needs a loss"):
        matsmerge.collect(model, iter(unlabelled), "fisher")


def test_what_notebooks_show(place: Path) -> None:
    found = matsmerge.collect(place / "model", place / "task.yaml")
    assert repr(found) == "<Statistics gram of model, 5 examples>"
    assert "rows.jsonl" in found._repr_html_()
