from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import gpt2_config, llama_config, make_tokenizer, save, write_rows
from torch.nn.functional import cross_entropy
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from matsmerge.data.template import Wording, Wordings
from matsmerge.errors import DataError
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.prediction import IGNORED
from matsmerge.tasks.task import encode_all
from matsmerge.tasks.task_file import TaskFile


def worded(text: str) -> Wordings:
    return Wordings([Wording(text=text)])


def load(folder: Path, model: Any = None, **options: Any) -> LoadedModel:
    model = LlamaForCausalLM(llama_config()) if model is None else model
    tokenizer = make_tokenizer(end=False, bos_token="<s>", pad_token=None)
    save(model, folder, tokenizer)
    return load_model(folder, TaskFile(**options))


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_only_the_target_is_predicted(model: str, tmp_path: Path) -> None:
    make = {"llama": None, "gpt2": GPT2LMHeadModel(gpt2_config())}
    loaded = load(tmp_path / "m", make[model])
    rows = [{"input": "a b c", "target": "d e"}, {"input": "f", "target": "g"}]
    batch = loaded.task.collate(encode_all(loaded.task, write_rows(tmp_path / "d.jsonl", rows)))
    assert batch.inputs["input_ids"].tolist() == [[2, 4, 5, 6, 7, 8, 3], [2, 9, 10, 3, 3, 3, 3]]
    assert batch.inputs["attention_mask"].sum(1).tolist() == [7, 4]
    none = IGNORED
    assert batch.targets is not None
    assert batch.targets.tolist() == [[none, none, none, 7, 8, 3], [none, 10, 3, none, none, none]]
    prediction = loaded.task.predict(loaded.model, batch)
    assert prediction.logits.shape[:2] == (2, 6)
    for ids, num_prompt, loss in zip(
        ([2, 4, 5, 6, 7, 8, 3], [2, 9, 10, 3]), (4, 2), prediction.losses(), strict=True
    ):
        logits = loaded.model(input_ids=torch.tensor([ids])).logits[0]
        expected = cross_entropy(
            logits[num_prompt - 1 : -1], torch.tensor(ids[num_prompt:]), reduction="sum"
        )
        torch.testing.assert_close(loss, expected)


def test_plain_text_is_predicted_but_for_its_first_token(tmp_path: Path) -> None:
    loaded = load(tmp_path / "m")
    data = write_rows(tmp_path / "d.jsonl", [{"text": "a b c"}, {"text": "d"}])
    prediction = loaded.task.predict(
        loaded.model, loaded.task.collate(encode_all(loaded.task, data))
    )
    ids = torch.tensor([[2, 4, 5, 6]])
    loss = loaded.model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(prediction.losses("mean")[0], loss)


def test_columns_and_templates(tmp_path: Path) -> None:
    task = load(tmp_path / "m").task
    rows = [{"text": "a", "input": "b", "target": "c", "x": "d"}]
    (both,) = encode_all(task, write_rows(tmp_path / "a.jsonl", rows))
    assert both.ids == [2, 5, 6, 3]
    (made,) = encode_all(
        task,
        write_rows(tmp_path / "b.jsonl", [{"target": "c", "x": "d"}]),
        wordings=worded("{x} {x}"),
    )
    assert made.ids == [2, 7, 7, 6, 3]
    (text,) = encode_all(
        task, write_rows(tmp_path / "c.jsonl", [{"x": "d"}]), wordings=worded("{x} {x}")
    )
    assert text.labels == [IGNORED, 7, 7]
    with pytest.raises(DataError, match="no column 'target'"):
        encode_all(task, write_rows(tmp_path / "d.jsonl", [{"input": "d"}]))
    with pytest.raises(DataError, match="no column 'text'"):
        encode_all(task, write_rows(tmp_path / "e.jsonl", [{"x": "d"}]))


def test_the_end_of_a_long_prompt_is_kept(tmp_path: Path) -> None:
    task = load(tmp_path / "m", max_length=6).task
    example = task.encode({"input": "a b c d e f", "target": "g h"}, 0)
    assert example.ids == [7, 8, 9, 10, 11, 3]
    assert example.labels == [IGNORED] * 3 + [10, 11, 3]
    example = task.encode({"input": "a b c", "target": "d e f g h i"}, 1)
    assert example.ids == [6, 7, 8, 9, 10, 11]
    assert task.notes == ["2 examples were longer than 6 tokens and cut, the longest by 5 tokens"]


def test_beginnings_and_ends(tmp_path: Path) -> None:
    """The end a tokenizer adds to a prompt is not shown; an empty prompt begins with <s>."""
    folder = save(LlamaForCausalLM(llama_config()), tmp_path / "m", make_tokenizer(begin=False))
    task = load_model(folder).task
    assert task.encode({"input": "a", "target": "b"}, 0).ids == [4, 5, 3]
    assert task.encode({"input": "", "target": "b"}, 0).ids == [3, 5, 3]
    bare = save(
        LlamaForCausalLM(llama_config()),
        tmp_path / "n",
        make_tokenizer(begin=False, end=False, eos_token=None),
    )
    task = load_model(bare).task
    assert task.encode({"input": "a", "target": "b"}, 0).ids == [4, 5]
    with pytest.raises(DataError, match="the input has no tokens"):
        task.encode({"input": "", "target": "b"}, 0)
    with pytest.raises(DataError, match="the answer has no tokens"):
        task.encode({"input": "a", "target": ""}, 0)
    with pytest.raises(DataError, match="'text': expected at least two tokens, found 1"):
        task.encode({"text": "a"}, 0)


def test_a_template_with_a_target(tmp_path: Path) -> None:
    """As the columns `input` and `target`: only the target is predicted."""
    task = load(tmp_path / "m").task
    plain = write_rows(tmp_path / "plain.jsonl", [{"input": "a b c", "target": "d"}])
    other = write_rows(tmp_path / "other.jsonl", [{"q": "a b c", "a": "d"}])
    wordings = Wordings([Wording(text="{q}", target="{a}")])
    assert encode_all(task, other, wordings=wordings) == encode_all(task, plain)
