from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import bart_config, make_tokenizer, save, t5_config, write_rows
from transformers import BartForConditionalGeneration, T5ForConditionalGeneration

from matsmerge.errors import DataError
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.prediction import IGNORED
from matsmerge.tasks.seq2seq import _shift_of
from matsmerge.tasks.task import encode_all

ROWS = [
    {"input": "a b c", "target": "d"},
    {"input": "e", "target": "f g h i"},
    {"input": "j k l m", "target": "n o"},
]
MODELS: dict[str, Callable[[], Any]] = {
    "t5": lambda: T5ForConditionalGeneration(t5_config()),
    "bart": lambda: BartForConditionalGeneration(bart_config()),
}


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_the_models_own(name: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(begin=name == "bart")
    loaded = load_model(save(MODELS[name](), tmp_path / "m", tokenizer))
    assert loaded.task.kind == "seq2seq"
    batch = loaded.task.collate(encode_all(loaded.task, write_rows(tmp_path / "d.jsonl", ROWS)))
    assert "labels" not in batch.inputs
    encoder_mask, decoder_mask = batch.row_masks
    assert encoder_mask.shape[1] != decoder_mask.shape[1]
    assert torch.equal(decoder_mask, batch.inputs["decoder_attention_mask"].bool())
    prediction = loaded.task.predict(loaded.model, batch)
    means, sums = prediction.losses("mean"), prediction.losses("sum")
    for n, row in enumerate(ROWS):
        inputs = tokenizer(row["input"], return_tensors="pt")
        labels = tokenizer(row["target"], return_tensors="pt")["input_ids"]
        loss = loaded.model(input_ids=inputs["input_ids"], labels=labels).loss
        torch.testing.assert_close(means[n], loss)
        torch.testing.assert_close(sums[n], loss * labels.shape[1])


def test_equal_lengths_are_made_different(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(begin=False)
    loaded = load_model(save(MODELS["t5"](), tmp_path / "m", tokenizer))
    data = write_rows(tmp_path / "d.jsonl", [{"input": "a b", "target": "c d"}])
    batch = loaded.task.collate(encode_all(loaded.task, data))
    assert batch.inputs["input_ids"].tolist() == [[4, 5, 3]]
    assert batch.inputs["decoder_input_ids"].tolist() == [[0, 6, 7, 3]]
    assert batch.inputs["decoder_attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert batch.targets is not None
    assert batch.targets.tolist() == [[6, 7, 3, IGNORED]]
    loss = loaded.model(input_ids=torch.tensor([[4, 5, 3]]), labels=torch.tensor([[6, 7, 3]])).loss
    torch.testing.assert_close(loaded.task.predict(loaded.model, batch).losses("mean")[0], loss)


def test_positions_suffice_for_the_longest(tmp_path: Path) -> None:
    loaded = load_model(save(MODELS["bart"](), tmp_path / "m", make_tokenizer()))
    rows = [{"input": "a " * 50, "target": "b " * n} for n in (9, 50)]
    examples = encode_all(loaded.task, write_rows(tmp_path / "d.jsonl", rows))
    for example in examples:
        assert len(example.ids) == 12
        assert len(example.labels) == 11
        batch = loaded.task.collate([example])
        assert loaded.task.predict(loaded.model, batch).losses().isfinite().all()
    assert loaded.task.notes == [
        "2 examples were longer than 12 tokens and cut, the longest by 41 tokens"
    ]


def test_shift_without_a_models_own(tmp_path: Path) -> None:
    model = MODELS["t5"]()
    labels = torch.tensor([[6, 7, 3], [8, IGNORED, IGNORED]])
    own = _shift_of(model)(labels)

    class Plain(torch.nn.Module):
        config = model.config

    assert torch.equal(_shift_of(Plain())(labels), own)
    folder = save(T5ForConditionalGeneration(t5_config()), tmp_path / "m", make_tokenizer())
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"decoder_start_token_id": 0', '"decoder_start_token_id": null')
    )
    with pytest.raises(
        DataError, match="which token its decoder starts with.*decoder_start_token_id"
    ):
        load_model(folder)


def test_empty_answers(tmp_path: Path) -> None:
    loaded = load_model(
        save(MODELS["t5"](), tmp_path / "m", make_tokenizer(begin=False, end=False))
    )
    with pytest.raises(DataError, match="the answer has no tokens"):
        loaded.task.encode({"input": "a", "target": ""}, 0)
