from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import bert_config, make_tokenizer, save, write_rows
from torch.nn.functional import cross_entropy
from transformers import BertForTokenClassification

from matsmerge.errors import DataError
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.prediction import IGNORED
from matsmerge.tasks.task import encode_all
from matsmerge.tasks.task_file import TaskFile

ROWS: list[dict[str, Any]] = [
    {"tokens": ["a", "b+c+d", "e"], "labels": [0, "LABEL_2", 1]},
    {"tokens": ["f"], "labels": [2]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = BertForTokenClassification(bert_config(num_labels=3))
    return save(model, tmp_path_factory.mktemp("bert"), make_tokenizer())


def load(folder: Path, need_targets: bool = True, **options: Any) -> LoadedModel:
    return load_model(folder, TaskFile(**options), need_targets=need_targets)


def test_first_tokens_of_words_are_predicted(folder: Path, tmp_path: Path) -> None:
    loaded = load(folder)
    batch = loaded.task.collate(encode_all(loaded.task, write_rows(tmp_path / "d.jsonl", ROWS)))
    assert batch.inputs["input_ids"].tolist() == [[2, 4, 5, 6, 7, 8, 3], [2, 9, 3, 0, 0, 0, 0]]
    none = IGNORED
    assert batch.targets is not None
    assert batch.targets.tolist() == [[none, 0, 2, none, none, 1, none], [none, 2, *[none] * 5]]
    prediction = loaded.task.predict(loaded.model, batch)
    assert prediction.logits.shape == (2, 7, 3)
    alone = loaded.model(input_ids=torch.tensor([[2, 9, 3]])).logits[0, 1]
    torch.testing.assert_close(prediction.losses()[1], cross_entropy(alone, torch.tensor(2)))
    losses = cross_entropy(
        prediction.logits[0, [1, 2, 5]], torch.tensor([0, 2, 1]), reduction="sum"
    )
    torch.testing.assert_close(prediction.losses()[0], losses)


def test_labels_are_used_where_there_are_any(folder: Path, tmp_path: Path) -> None:
    task = load(folder, need_targets=False).task
    data = write_rows(tmp_path / "d.jsonl", ROWS)
    assert task.collate(encode_all(task, data)).targets is not None
    data = write_rows(tmp_path / "e.jsonl", [{"tokens": ["a"]}])
    assert task.collate(encode_all(task, data)).targets is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "labels": [0]}, "'labels': expected 2, one per word, found 1"),
        ({"tokens": "a b", "labels": [0, 1]}, "'tokens': expected a list, found str 'a b'"),
        ({"tokens": ["a", 1], "labels": [0, 1]}, "list of texts, found int 1 at position 2"),
        ({"tokens": [], "labels": []}, "the list is empty"),
        (
            {"tokens": ["a"], "labels": [3]},
            "label 3 is out of range; expected a class of the model from 0 to 2",
        ),
        ({"tokens": ["a"], "labels": [-100]}, "no word has both a token and a label"),
        ({"tokens": "[1", "labels": [0]}, "'tokens': expected a list: not valid JSON"),
    ],
)
def test_wrong_rows(row: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(DataError, match=message):
        load(folder).task.encode(row, 0)


def test_lists_in_text_files_and_words_without_tokens(folder: Path) -> None:
    task = load(folder, max_length=4).task
    assert task.encode({"tokens": '["a", "b"]', "labels": "[0, 1]"}, 0).length == 4
    task.encode({"tokens": ["a", " "], "labels": [0, 1]}, 1)
    task.encode({"tokens": ["a", "b", "c"], "labels": [0, 1, 1]}, 2)
    assert task.notes == [
        "1 example was longer than 4 tokens and cut, by 1 token",
        "1 examples have words without tokens, which are not predicted",
    ]
