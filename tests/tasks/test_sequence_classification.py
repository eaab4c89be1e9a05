from pathlib import Path

import pytest
import torch
from tiny_models import bert_config, gpt2_config, make_tokenizer, save, write_rows
from torch.nn.functional import cross_entropy
from transformers import BertForSequenceClassification, GPT2ForSequenceClassification

from matsmerge.errors import DataError
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task import encode_all
from matsmerge.tasks.task_file import TaskFile

ROWS = [{"text": "a b c d", "label": 0}, {"text": "e", "label": 2}, {"text": "f g", "label": 1}]


@pytest.mark.parametrize("pairs", [False, True])
def test_losses_are_those_of_single_examples(pairs: bool, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    model = BertForSequenceClassification(bert_config(num_labels=3))
    loaded = load_model(save(model, tmp_path / "m", tokenizer))
    rows = [row | {"text_pair": "h i"} for row in ROWS] if pairs else ROWS
    examples = encode_all(loaded.task, write_rows(tmp_path / "d.jsonl", rows))
    batch = loaded.task.collate(examples).to("cpu")
    assert batch.examples == [0, 1, 2]
    (mask,) = batch.row_masks
    assert mask.sum(1).tolist() == [example.length for example in examples]
    losses = loaded.task.predict(loaded.model, batch).losses()
    for row, loss in zip(rows, losses, strict=True):
        inputs = tokenizer(row["text"], row.get("text_pair"), return_tensors="pt")
        assert bool(inputs["token_type_ids"].any()) == pairs
        logits = loaded.model(**inputs).logits
        torch.testing.assert_close(loss, cross_entropy(logits[0], torch.tensor(row["label"])))


def test_decoders_classify_padded_batches(tmp_path: Path) -> None:
    """Without a padding token of their own."""
    tokenizer = make_tokenizer(begin=False, end=False, pad_token=None)
    model = GPT2ForSequenceClassification(gpt2_config(num_labels=3))
    loaded = load_model(save(model, tmp_path / "m", tokenizer))
    batch = loaded.task.collate(encode_all(loaded.task, write_rows(tmp_path / "d.jsonl", ROWS)))
    logits = loaded.task.predict(loaded.model, batch).logits
    for row, found in zip(ROWS, logits, strict=True):
        expected = loaded.model(**tokenizer(row["text"], return_tensors="pt")).logits[0]
        torch.testing.assert_close(found, expected)


def test_labels_are_not_looked_at_where_not_needed(tmp_path: Path) -> None:
    folder = save(BertForSequenceClassification(bert_config()), tmp_path / "m", make_tokenizer())
    loaded = load_model(folder, need_targets=False)
    data = write_rows(tmp_path / "d.jsonl", [{"text": "a", "label": -1}, {"text": "b", "label": 9}])
    batch = loaded.task.collate(encode_all(loaded.task, data)).to("cpu")
    assert batch.targets is None
    assert loaded.task.predict(loaded.model, batch).targets is None


def test_long_texts_are_cut_and_counted(tmp_path: Path) -> None:
    folder = save(BertForSequenceClassification(bert_config()), tmp_path / "m", make_tokenizer())
    rows = [{"text": "a " * n, "label": 0} for n in (1, 6, 7, 100)]
    data = write_rows(tmp_path / "d.jsonl", rows)
    loaded = load_model(folder, TaskFile(max_length=8))
    lengths = [example.length for example in encode_all(loaded.task, data)]
    assert lengths == [3, 8, 8, 8]
    encode_all(loaded.task, data)
    assert loaded.task.notes == [
        "2 examples were longer than 8 tokens and cut, the longest by 94 tokens"
    ]
    unlimited = load_model(folder).task
    assert max(example.length for example in encode_all(unlimited, data)) == 32
    with pytest.raises(DataError, match="max_length from 1 to 32, .* found 33"):
        load_model(folder, TaskFile(max_length=33))
    bare = save(
        BertForSequenceClassification(bert_config()),
        tmp_path / "b",
        make_tokenizer(begin=False, end=False),
    )
    with pytest.raises(DataError, match="row 1: 'text': has no tokens"):
        encode_all(
            load_model(bare).task, write_rows(tmp_path / "e.jsonl", [{"text": " ", "label": 0}])
        )
