"""Which classes a task has: as its file lists them, or as its training data does."""

import difflib
from collections.abc import Iterator
from typing import Any

from matsmerge.errors import DataError
from matsmerge.tasks.data import Data
from matsmerge.tasks.kinds import TASKS
from matsmerge.tasks.prediction import IGNORED
from matsmerge.tasks.problems import describe
from matsmerge.tasks.task_file import TaskFile


def class_names(task_file: TaskFile, kind: str, data: Data) -> list[str]:
    """Names of the classes in the order of their numbers.

    Where the file lists none: the labels of the training data in order; numbers, from 0 on, are
    their own names.
    """
    name = task_file.name or "the task"
    if task_file.labels is not None:
        if len(set(task_file.labels)) != len(task_file.labels) or len(task_file.labels) < 2:
            raise DataError(
                f"{name}: labels: expected at least two different names, found "
                f"{', '.join(task_file.labels)}"
            )
        return list(task_file.labels)
    found = set(_labels(task_file, kind, data))
    if not found:
        raise DataError(f"{data.name}: has no labels at all")
    if all(isinstance(label, int) for label in found):
        return _numbered(data, {int(label) for label in found})
    if any(isinstance(label, int) for label in found):
        raise DataError(
            f"{data.name}: some labels are numbers and some are names; list the names as labels: "
            f"[...] in {name}, in the order of the numbers"
        )
    names = sorted(map(str, found), key=_numbers_in_order)
    if len(names) < 2:
        raise DataError(f"{data.name}: every label is '{names[0]}'; expected at least two classes")
    return names


def are_numbers(names: list[str]) -> bool:
    """Are these classes just 0, 1, 2, ...?"""
    return names == [str(number) for number in range(len(names))]


def _labels(task_file: TaskFile, kind: str, data: Data) -> Iterator[int | str]:
    target = TASKS[kind].targets
    assert target is not None
    column = task_file.columns.get(target, target)
    if column not in data.columns:
        near = difflib.get_close_matches(column, data.columns, n=1, cutoff=0.5)
        meant = f"; did you mean '{near[0]}'?" if near else "."
        raise DataError(
            f"{data.name}: has no column '{column}' for the task {kind}{meant} Its columns are "
            f"{', '.join(data.columns)}; say which one it is with columns: {{{target}: ...}} in "
            "the task file"
        )
    for number, row in enumerate(data.rows):
        value: Any = row.get(column)
        for label in value if isinstance(value, (list, tuple)) else [value]:
            plain = label.item() if hasattr(label, "item") else label
            if not isinstance(plain, (int, str)):
                raise DataError(
                    f"{data.name}: row {number + 1}: '{column}': expected a label, a number or a "
                    f"name, found {describe(plain)}"
                )
            if plain != IGNORED:
                yield int(plain) if isinstance(plain, bool) else plain


def _numbered(data: Data, found: set[int]) -> list[str]:
    num_classes = max(found) + 1
    if min(found) < 0 or num_classes < 2 or 2 * len(found) < num_classes:
        some = ", ".join(map(str, sorted(found)[:10]))
        raise DataError(
            f"{data.name}: expected labels that count from 0 to the number of classes less one, or "
            f"names; found {some}"
        )
    return [str(number) for number in range(num_classes)]


def _numbers_in_order(name: str) -> tuple[bool, int, str]:
    """Numbers before names, 10 after 9."""
    is_number = name.isdecimal()
    return (not is_number, int(name) if is_number else 0, name)
