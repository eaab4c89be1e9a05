"""Which classes a task has."""

from pathlib import Path
from typing import Any

import pytest

from matsmerge.data.rows import Data
from matsmerge.errors import DataError
from matsmerge.lab.training.training_data import class_names
from matsmerge.tasks.kinds import TASKS
from matsmerge.tasks.task_file import TaskFile

KIND = TASKS["sequence_classification"]


def data(labels: list[Any], column: str = "label") -> Data:
    return Data("d", ["text", column], [{"text": "a", column: label} for label in labels], Path())


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["b", "a", "b"], ["a", "b"]),
        ([1, 0, 1], ["0", "1"]),
        ([True, False], ["0", "1"]),
        ([2, 0, 2], ["0", "1", "2"]),
        (["10", "9", "2"], ["2", "9", "10"]),
    ],
)
def test_found_in_the_data(labels: list[Any], expected: list[str]) -> None:
    assert class_names(TaskFile(name="t"), KIND, data(labels)) == expected


def test_listed_in_the_file() -> None:
    file = TaskFile(name="t", labels=["z", "y"])
    assert class_names(file, KIND, data(["y"])) == ["z", "y"]


def test_of_words() -> None:
    found = data([["B", "O"], ["O", -100]], "labels")
    assert class_names(TaskFile(name="t"), TASKS["token_classification"], found) == ["B", "O"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", "a"], "every label is 'a'"),
        ([0, 0], "count from 0"),
        ([0, -1], "count from 0"),
        ([3, 100], "found 3, 100"),
        ([0, "a"], "some labels are numbers and some are names"),
        (["a", None], "row 2: 'label': expected a label.*found null"),
        ([0.5, 1.0], "row 1: 'label': expected a label"),
    ],
)
def test_labels_that_are_no_classes(labels: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        class_names(TaskFile(name="t"), KIND, data(labels))
