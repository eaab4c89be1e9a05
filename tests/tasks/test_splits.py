from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from tiny_models import write_rows

from matsmerge.errors import DataError
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task_file import TaskFile


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A dataset with the splits `train` (rows 0 to 19) and `validation` (rows 100 to 104)."""
    splits = {"train": range(20), "validation": range(100, 105)}
    made = {split: Dataset.from_dict({"n": list(rows)}) for split, rows in splits.items()}
    DatasetDict(made).save_to_disk(tmp_path / "saved")
    return str(tmp_path / "saved")


def numbers(source: str, splits: dict[str, str], split: str, seed: int = 0) -> list[int]:
    task = TaskFile(name="t", data=source, splits=splits, seed=seed)
    return [row["n"] for row in read_split(task, split).rows]


def test_parts_of_a_split_are_apart(saved: str) -> None:
    splits = {"train": "train[6:]", "validation": "train[:6]", "test": "validation"}
    train, validation = (numbers(saved, splits, split) for split in ("train", "validation"))
    assert len(train) == 14
    assert sorted(train + validation) == list(range(20))
    assert validation != list(range(6))  # rows may be stored class by class
    assert numbers(saved, splits, "test") == list(range(100, 105))
    assert numbers(saved, splits, "validation") == validation
    assert numbers(saved, splits, "validation", seed=1) != validation


def test_parts_count_from_the_end_too(saved: str) -> None:
    splits = {"train": "train[:-6]", "middle": "train[-6:-2]", "validation": "train[-2:]"}
    found = [numbers(saved, splits, split) for split in splits]
    assert list(map(len, found)) == [14, 4, 2]
    assert sorted(n for rows in found for n in rows) == list(range(20))


def test_slices_of_a_part(saved: str) -> None:
    task = TaskFile(data=saved, splits={"a": "train[:9]"}, fields={"again": "n"})
    data = read_split(task, "a")
    assert data.rows[2:4] == [data.rows[2], data.rows[3]]
    assert data.split == "a"
    assert data.name == f"{saved} (a)"


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"a": "train[5:]", "b": "train[:6]"}, "a and b share rows of 'train', which has 20"),
        ({"a": "train[5:]", "b": "train"}, "a and b share rows of 'train'"),
        ({"a": "train", "b": "train[-1:]"}, "a and b share rows of 'train'"),
        ({"a": "train[20:]"}, "of 20 rows none is left for a"),
        ({"a": "train[5]"}, r"a is 'train\[5\]'; expected the name of a split in the data, or a p"),
        ({"a": "train[0.5:]"}, "expected the name of a split"),
        ({"a": "trian[5:]"}, "has no split 'trian'; did you mean 'train'"),
    ],
)
def test_parts_that_cannot_be(saved: str, splits: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        numbers(saved, splits, "a")


def choosing(folder: Path, rows: list[dict[str, Any]], **more: Any) -> TaskFile:
    write_rows(folder / "rows.jsonl", rows)
    content = {"task": "multiple_choice", "data": str(folder / "rows.jsonl"), **more}
    return TaskFile.model_validate(content)


def test_fields_are_what_columns_hold(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"choices": {"text": ["x", "y"], "label": ["A", "B"]}, "id": 1},
        {"choices": {"text": ["z"]}, "id": 2},
        {"choices": None, "id": 3},
    ]
    fields = {"all": "choices.text", "second": "choices.text.1", "key": "choices.label.0.0"}
    data = read_split(choosing(tmp_path, rows, fields=fields))
    assert data.columns == ["choices", "id", "all", "second", "key"]
    assert [row["second"] for row in data.rows] == ["y", None, None]
    assert [row["all"] for row in data.rows] == [["x", "y"], ["z"], None]
    assert all(row["key"] is None for row in data.rows)  # no characters of texts
    assert data.rows[0]["id"] == 1


def test_fields_that_cannot_be(tmp_path: Path) -> None:
    task = choosing(tmp_path, [{"choices": 1}], fields={"choices": "choices", "a": "choice.0"})
    with pytest.raises(DataError) as caught:
        read_split(task)
    taken, missing = caught.value.problems
    assert "'choices' is a column of the data already" in taken
    assert "has no column 'choice', where 'a' is; did you mean 'choices'?" in missing


@pytest.mark.parametrize(
    ("labels", "given", "expected"),
    [
        (["A", "B"], ["B", "A", "C", ""], [1, 0, "C", ""]),
        (["A", "B"], [1, 0], [1, 0]),
        (["1", "2"], ["2", "1"], [1, 0]),
        (["1", "2"], [2, 1], [1, 0]),
        (["1", "2"], [0, "3"], ["0 (none of labels:)", "3 (none of labels:)"]),
        (None, ["B", 1], ["B", 1]),
    ],
)
def test_names_of_choices_become_numbers(
    tmp_path: Path, labels: list[str] | None, given: list[Any], expected: list[Any]
) -> None:
    task = choosing(
        tmp_path, [{"gold": v} for v in given], labels=labels, columns={"label": "gold"}
    )
    assert [row["gold"] for row in read_split(task).rows] == expected


def test_names_of_classes_stay(tmp_path: Path) -> None:
    task = choosing(tmp_path, [{"label": "b"}], labels=["a", "b"], task="sequence_classification")
    assert read_split(task).rows[0]["label"] == "b"


@pytest.fixture
def ten(tmp_path: Path) -> str:
    write_rows(tmp_path / "ten.jsonl", [{"n": n} for n in range(10)])
    return str(tmp_path / "ten.jsonl")


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ({"train": 0.7, "test": 0.3}, [7, 3]),
        ({"train": 0.5, "test": 0.25, "other": 0.25}, [6, 2, 2]),  # no row is left over
        ({"train": 0.5, "test": 0.2}, [5, 2]),
        ({"train": 4, "test": 6}, [4, 6]),
        ({"train": 4, "test": 0.5}, [4, 5]),
    ],
)
def test_shares_and_numbers_of_rows(ten: str, splits: dict[str, Any], expected: list[int]) -> None:
    found = [numbers(ten, splits, split) for split in splits]
    assert list(map(len, found)) == expected
    together = [n for rows in found for n in rows]
    assert len(set(together)) == len(together)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": 1.5}, "train is 1.5; expected a share up to 1.0 or a number of rows"),
        ({"train": 0}, "train is 0; expected a share"),
        ({"train": -3}, "train is -3; expected a share"),
        ({"train": 8, "test": 4}, "12 rows in all, and the data has 10"),
        ({"train": 0.9, "test": 0.01}, "of 10 rows none is left for test"),
    ],
)
def test_cuts_that_cannot_be(ten: str, splits: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"t: splits: .*{message}|t: splits: {message}"):
        numbers(ten, splits, "train")


def test_which_split_is_meant(ten: str) -> None:
    halves: dict[str, Any] = {"train": 5, "test": 5}
    task = TaskFile(name="t", data=ten, splits=halves)
    with pytest.raises(DataError, match="t: has the splits train, test; say which one to use"):
        read_split(task)
    with pytest.raises(DataError, match="t: has no split 'dev', only train, test"):
        read_split(task, "dev")
    assert len(read_split(task.model_copy(update={"split": "test"}))) == 5


def test_a_source_for_each_split(ten: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "other.jsonl", [{"n": 99}])
    sources = {"train": ten, "test": str(tmp_path / "other.jsonl")}
    task = TaskFile(name="t", data=sources)
    assert [row["n"] for row in read_split(task, "test").rows] == [99]
    with pytest.raises(DataError, match="t: has no split 'dev', only train, test"):
        read_split(task, "dev")
    both = task.model_copy(update={"splits": {"train": 5}})
    with pytest.raises(DataError, match="t: has a source for each split, and splits: too"):
        read_split(both, "train")


def test_a_task_without_data() -> None:
    with pytest.raises(DataError, match="t: names no data; add a line data: FILE"):
        read_split(TaskFile(name="t"))


def test_splits_that_are_all_of_one(saved: str) -> None:
    splits = {"train": "train", "test": "train"}
    with pytest.raises(DataError, match="train and test are all of 'train'; use parts"):
        numbers(saved, splits, "train")
