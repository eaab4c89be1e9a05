"""A real Trainer with the callback: it trains as without, and what is written is the model's."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import bert_config, llama_config, make_tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import (
    BertForSequenceClassification,
    LlamaForCausalLM,
    Trainer,
    TrainerState,
    TrainingArguments,
)

import matsmerge
from matsmerge import DataError, RecipeError, StatisticsCallback
from matsmerge.data.rows import fingerprint_rows
from matsmerge.statistics.ranks import AUTO_RANK

SECRET = "where-nobody-looks"


def make_rows(num: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    return [
        {
            "input_ids": [2, *generator.choices(range(4, 20), k=3 + i % 3), 3],
            "label": i % 3,
            "where": f"/home/me/{i}",  # which no model takes
        }
        for i in range(num)
    ]


def pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    assert all("where" not in row for row in rows)
    longest = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    batch = {"input_ids": torch.tensor(ids), "attention_mask": (torch.tensor(ids) > 0).long()}
    if "label" in rows[0]:
        batch["labels"] = torch.tensor([row["label"] for row in rows])
    return batch


def pad_at_random(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """With a token replaced by chance, of all three kinds."""
    batch = pad(rows)
    batch["input_ids"][0, 1] = 4 + int(16 * torch.rand(()))
    batch["input_ids"][0, 2] = random.randrange(4, 20)
    batch["input_ids"][-1, 1] = np.random.randint(4, 20)
    return batch


def pad_text(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = pad([{"input_ids": row["input_ids"]} for row in rows])
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def bert(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return BertForSequenceClassification(bert_config(num_labels=3))


def train(model: Any, out: Path, *callbacks: Any, collate: Any = pad, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "num_train_epochs": 1, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "learning_rate": 0.01, "dataloader_pin_memory": False,
    }  # fmt: skip
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(out), **settings | options),
        train_dataset=make_rows(12, seed=1),
        data_collator=collate,
        processing_class=make_tokenizer(),
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


def check_same(statistics: matsmerge.Statistics, expected: matsmerge.Statistics) -> None:
    assert statistics.header.maps == expected.header.maps
    # Only what a task or a trainer says of a batch has labels to count right answers by.
    sets = {
        of: own.model_copy(update={"marks": None}) for of, own in statistics.header.sets.items()
    }
    assert sets == expected.header.sets
    assert statistics.arrays.specs.keys() == expected.arrays.specs.keys()
    for name in expected.arrays.specs:
        torch.testing.assert_close(statistics.arrays[name].float(), expected.arrays[name].float())


def test_training_is_not_disturbed(tmp_path: Path) -> None:
    """Dropout and a collator draw random numbers, and statistics are collected after each step."""
    callback = StatisticsCallback(make_rows(6), "kfac,fisher", on="save", num_examples=5)
    weights, drawn, modes = [], [], []
    for name, callbacks in (("with", [callback]), ("without", [])):
        model = bert()
        model.bert.embeddings.requires_grad_(False)
        options = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
        train(model, tmp_path / name, *callbacks, collate=pad_at_random, **options)
        weights.append(model.state_dict())
        drawn.append((torch.rand(3).tolist(), random.random(), np.random.rand()))
        modes.append([(n, p.requires_grad, p.grad is None) for n, p in model.named_parameters()])
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
    assert drawn[0] == drawn[1]
    assert modes[0] == modes[1]
    for step in (1, 2, 3):
        folder = tmp_path / "with" / f"checkpoint-{step}"
        found = matsmerge.open_statistics(folder / "statistics.safetensors")
        assert found.header.num_examples == 5
        # Of all parameters, as `mats collect` has them, also those that are not trained.
        assert "bert.embeddings.word_embeddings.weight" in found.parameters("fisher")
    assert not (tmp_path / "with" / "statistics.safetensors").exists()


def test_at_the_end_the_model_and_its_statistics_are_in_the_folder(tmp_path: Path) -> None:
    rows = make_rows(7)
    names = {}
    for i, name in enumerate(("one", "two")):
        callback = StatisticsCallback(rows, "kfac", name="/home/me/rows.jsonl")
        train(bert(i), tmp_path / name, callback)
        loaded = BertForSequenceClassification.from_pretrained(tmp_path / name)
        plain = [{k: v for k, v in row.items() if k != "where"} for row in rows]
        batches = [pad(plain[n : n + 3]) for n in range(0, 7, 3)]

        def loss(model: Any, batch: Any) -> Tensor:
            logits = model(batch["input_ids"], batch["attention_mask"]).logits
            return cross_entropy(logits, batch["labels"], reduction="none")

        found = matsmerge.open_statistics(tmp_path / name / "statistics.safetensors")
        expected = matsmerge.collect(
            loaded, batches, "kfac", loss=loss, checkpoint=tmp_path / name, name=name
        )
        check_same(found, expected)
        assert found.header.model == expected.header.model
        assert found.header.options == expected.header.options
        marks = found.header.sets["main"].marks
        assert marks is not None
        assert (marks.num, marks.labels) == (7, {"0": 3, "1": 2, "2": 2})
        names[name] = found.header.data[0]
    assert names["one"].name == "rows.jsonl"
    assert names["one"].fingerprint == names["two"].fingerprint == fingerprint_rows(rows)
    # They belong to their models.
    with pytest.warns(UserWarning, match="merged by average, since the objective has nothing"):
        matsmerge.merge(
            [tmp_path / "one", tmp_path / "two"], method="regmean", out=tmp_path / "merged"
        )
    assert (tmp_path / "merged" / "model.safetensors").exists()


def test_a_language_model_and_a_loader(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(tie_word_embeddings=True))
    rows: Any = make_rows(8)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=2, collate_fn=pad_text)
    callback = StatisticsCallback(loader, "kfac", num_examples=5, reduction="mean", held_out=0.4)
    train(model, tmp_path / "m", callback, collate=pad_text)

    def loss(model: Any, batch: Any) -> Tensor:
        logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
        targets = batch["labels"][:, 1:]
        losses = cross_entropy(logits.mT, targets, reduction="none", ignore_index=-100)
        return torch.div(losses.sum(1), (targets != -100).sum(1))

    found = matsmerge.open_statistics(tmp_path / "m" / "statistics.safetensors")
    assert {of: s.num_examples for of, s in found.header.sets.items()} == {"main": 4, "held_out": 2}
    assert found.header.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert found.header.data[0].fingerprint == ""
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "m")
    batches = list(loader)[:3]
    options: dict[str, Any] = {"reduction": "mean", "held_out": 0.4}
    expected = matsmerge.collect(
        loaded, batches, "kfac", loss=loss, checkpoint=tmp_path / "m", **options
    )
    check_same(found, expected)


def test_mixed_precision_is_for_training_alone(tmp_path: Path) -> None:
    """The model runs in its own precision, as it is saved, and is trained on as it was."""
    rows = [{"input_ids": row["input_ids"], "label": row["label"]} for row in make_rows(3)]
    weights = []
    for name, callbacks in (("with", [StatisticsCallback(rows, on="save")]), ("without", [])):
        model = bert()
        options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
        train(model, tmp_path / name, *callbacks, bf16=True, **options)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[1])
    folder = tmp_path / "with" / "checkpoint-2"
    loaded = BertForSequenceClassification.from_pretrained(folder)
    found = matsmerge.open_statistics(folder / "statistics.safetensors")
    check_same(found, matsmerge.collect(loaded, [pad(rows)], checkpoint=folder))


def test_only_the_first_process_collects(tmp_path: Path) -> None:
    callback = StatisticsCallback(make_rows(3))
    state = TrainerState(is_world_process_zero=False)
    arguments = TrainingArguments(output_dir=str(tmp_path / "m"), use_cpu=True)
    for event in (callback.on_train_begin, callback.on_save, callback.on_train_end):
        event(arguments, state, None, model=None, train_dataloader=None)
    assert not (tmp_path / "m").exists()


def test_what_is_wrong_is_said_before_training(tmp_path: Path) -> None:
    def refused(callback: Any, model: Any = None) -> str:
        with pytest.raises((DataError, RecipeError)) as error:
            train(bert() if model is None else model, tmp_path / "m", callback)
        assert not (tmp_path / "m" / "model.safetensors").exists()
        return str(error.value)

    unlabelled = [{"input_ids": row["input_ids"]} for row in make_rows(4)]
    assert "expected 'labels'" in refused(StatisticsCallback(unlabelled, "kfac"))
    assert "not a single example" in refused(StatisticsCallback([], "gram"))
    adapted = get_peft_model(bert(), LoraConfig(target_modules=["query"]))
    assert "is a PEFT adapter" in refused(StatisticsCallback(make_rows(4)), adapted)
    with pytest.raises(RecipeError, match="on: expected one of train_end, save, found 'end'"):
        StatisticsCallback(make_rows(4), on="end")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="'grams' is not a kind of statistic"):
        StatisticsCallback(make_rows(4), "grams")
    with pytest.raises(RecipeError, match="num_examples: expected at least 1, found 0"):
        StatisticsCallback(make_rows(4), num_examples=0)


def test_nothing_private_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (Path(SECRET) / "deeper" / "one", tmp_path / SECRET / "two"):
        name = str(tmp_path / SECRET / "rows.jsonl")
        train(bert(), out, StatisticsCallback(make_rows(4), name=name))
        written = (out / "statistics.safetensors").read_bytes()
        assert SECRET.encode() not in written
        assert b"/home/me" not in written
        found = matsmerge.open_statistics(out / "statistics.safetensors").header
        assert (found.model.name, found.data[0].name) == (out.name, "rows.jsonl")


def test_wide_layers_are_sketches_where_a_rank_is_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = bert_config(num_labels=3)
    config.intermediate_size = 2 * AUTO_RANK + 8
    model = BertForSequenceClassification(config)
    train(model, tmp_path, StatisticsCallback(make_rows(6), "kfac", rank="auto"))
    found = matsmerge.open_statistics(tmp_path / "statistics.safetensors")
    assert found.header.sketching is not None
    key = "main/inputs/bert.encoder.layer.0.output.dense"
    assert found.header.forms[key] == "sketch"
    width = config.intermediate_size + 1  # with the constant input of the bias
    assert found.arrays.specs[key].shape == (width, AUTO_RANK + 1)
