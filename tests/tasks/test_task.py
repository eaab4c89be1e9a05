"""Columns, templates, labels and rows, on a task for a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import bert_config, make_tokenizer, save, write_rows
from transformers import BertForSequenceClassification

from matsmerge.data.labels import Labels
from matsmerge.data.template import Template, Wording, Wordings
from matsmerge.errors import DataError
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task import Task, encode_all
from matsmerge.tasks.task_file import TaskFile


def worded(text: str) -> Wordings:
    return Wordings([Wording(text=text)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = bert_config(
        id2label={0: "bad", 1: "good", 2: "so-so"}, label2id={"bad": 0, "good": 1, "so-so": 2}
    )
    return save(
        BertForSequenceClassification(config), tmp_path_factory.mktemp("bert"), make_tokenizer()
    )


def task(folder: Path, need_targets: bool = True, **options: Any) -> Task[Any]:
    return load_model(folder, TaskFile(**options), need_targets=need_targets).task


def test_columns_are_mapped(folder: Path, tmp_path: Path) -> None:
    rows = [{"sentence": "a b", "gold": "good", "text": 3}, {"sentence": "c", "gold": 0, "text": 4}]
    data = write_rows(tmp_path / "d.jsonl", rows)
    columns = {"text": "sentence", "label": "gold"}
    encoded = encode_all(task(folder), data, columns)
    assert [(e.number, e.length, e.label) for e in encoded] == [(0, 4, 1), (1, 3, 0)]
    assert encode_all(task(folder), data, columns, [1]) == encoded[1:]


def test_missing_columns(folder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"txt": "a b", "gold": 1}])
    with pytest.raises(DataError) as caught:
        encode_all(task(folder), data)
    first, second = caught.value.problems
    assert first == (
        f"{data.name}: has no column 'text' for the task sequence_classification; did you mean "
        "'txt'? Its columns are txt, gold; say which one it is with `columns: {text: txt}` in a task "
        "file or beside `path` in a recipe, or with --columns text=txt of mats collect"
    )
    assert "no column 'label'" in second
    assert "`columns: {label: ...}`" in second
    with pytest.raises(DataError, match="no column 'lable'; did you mean 'label'"):
        encode_all(task(folder), data, {"lable": "gold"})
    with pytest.raises(DataError, match="no column 'pair'"):
        encode_all(task(folder), data, {"text": "txt", "label": "gold", "text_pair": "pair"})
    encode_all(task(folder, need_targets=False), data, {"text": "txt"})


def test_all_problems_of_all_rows(folder: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "label": 1},
        {"text": None, "label": 0},
        {"text": "b"},
    ]
    rows += [{"text": "c", "label": 3}] * 12
    with pytest.raises(DataError) as caught:
        encode_all(task(folder), write_rows(tmp_path / "d.jsonl", rows))
    problems = caught.value.problems
    assert problems[0].endswith("d.jsonl: row 2: 'text': expected text, found null")
    assert problems[1].endswith("row 3: 'label': there is none in this row")
    assert problems[2].endswith(
        "row 4: label 3 is out of range; expected a class of the model from 0 to 2"
    )
    assert len(problems) == 11
    assert problems[-1] == "and 4 more"


def test_template(folder: Path, tmp_path: Path) -> None:
    data = write_rows(
        tmp_path / "d.jsonl", [{"x": "a", "y": "b", "label": 1}, {"x": "c", "y": None, "label": 1}]
    )
    (example,) = encode_all(task(folder), data, numbers=[0], wordings=worded("d {x} {{ {y}"))
    assert example.features["input_ids"] == [2, 7, 4, 1, 5, 3]
    with pytest.raises(DataError, match="row 2: 'y': expected text for the template, found null"):
        encode_all(task(folder), data, wordings=worded("{x} {y}"))
    with pytest.raises(DataError, match="no column 'z', which the template names"):
        encode_all(task(folder), data, wordings=worded("{z}"))


@pytest.mark.parametrize(
    "text", ["{", "{x.__class__}", "{x[0]}", "{x!r}", "{x:>9}", "{}", "no column"]
)
def test_templates_only_put_values_into_text(text: str) -> None:
    with pytest.raises(DataError, match="template"):
        Template(text)


@pytest.mark.parametrize(
    ("value", "number"), [(2, 2), ("so-so", 2), ("1", 1), (True, 1), (torch.tensor(2), 2)]
)
def test_labels(value: Any, number: int) -> None:
    assert Labels(3, {"bad": 0, "good": 1, "so-so": 2}).number(value) == number


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "label 3 is out of range; expected a class of the model from 0 to 2"),
        (-1, "label -1 is out of range"),
        ("-1", "label -1 is out of range"),
        ("god", "label 'god' is no class of the model; did you mean 'good'"),
        (1.0, "expected a label from 0 to 2 or the name of a class of the model, found float 1.0"),
        (None, "found null"),
    ],
)
def test_wrong_labels(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Labels(3, {"bad": 0, "good": 1, "so-so": 2}).number(value)


def test_label_names_can_be_given(folder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"text": "a", "label": "y"}])
    (example,) = encode_all(task(folder, labels=["x", "y", "z"]), data)
    assert example.label == 1
    with pytest.raises(DataError, match="expected 3 different names of classes.*found 2: x, y"):
        task(folder, labels=["x", "y"])


@pytest.mark.parametrize(
    "options", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}]
)
def test_only_one_of_several_classes(options: dict[str, Any], tmp_path: Path) -> None:
    folder = save(BertForSequenceClassification(bert_config(**options)), tmp_path, make_tokenizer())
    with pytest.raises(DataError, match="chooses one of several classes"):
        load_model(folder)


def test_labels_in_another_order_than_the_models() -> None:
    config = bert_config(num_labels=2)
    config.label2id = {"no": 0, "yes": 1}
    model = BertForSequenceClassification(config)
    assert Labels.of_model(model, ["no", "yes"]).number("yes") == 1
    with pytest.raises(DataError, match="the same classes in another order, no, yes"):
        Labels.of_model(model, ["yes", "no"])
    assert Labels.of_model(model, ["bad", "good"]).number("good") == 1
