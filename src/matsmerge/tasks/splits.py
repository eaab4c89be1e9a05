"""The parts of a task's data: training, validation, test, or whatever they are called."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matsmerge.errors import DataError
from matsmerge.tasks.data import Data, read_data
from matsmerge.tasks.task_file import TaskFile


def read_split(task: TaskFile, split: str | None = None) -> Data:
    """The rows of a split; of a task without splits, all rows.

    Splits that are made from one source never share a row, and are the same every time.
    """
    data = _read(task, split)
    return replace(data, split=split or task.split)


def _read(task: TaskFile, split: str | None) -> Data:
    name, source = task.name or "the task", task.data
    split = split or task.split
    if source is None:
        raise DataError(f"{name}: names no data; add a line data: FILE")
    if isinstance(source, Mapping):
        if task.splits is not None:
            raise DataError(f"{name}: has a source for each split, and splits: too; leave out one")
        if split is None:
            raise DataError(f"{name}: has data for {', '.join(source)}; say which split to use")
        if split not in source:
            raise DataError(
                f"{name}: has no data for the split '{split}', only {', '.join(source)}"
            )
        return read_data(source[split])
    if task.splits is None:
        return read_data(source, split=split)
    if split is None:
        raise DataError(f"{name}: has the splits {', '.join(task.splits)}; say which one to use")
    if split not in task.splits:
        raise DataError(f"{name}: has no split '{split}', only {', '.join(task.splits)}")
    size = task.splits[split]
    if isinstance(size, str):
        return read_data(source, split=size)
    data = read_data(source)
    numbers = _cut(name, len(data), task.splits, task.seed)[split]
    return replace(data, name=f"{data.name} ({split})", rows=_Chosen(data.rows, numbers))


def _cut(name: str, num_rows: int, sizes: Mapping[str, Any], seed: int) -> dict[str, list[int]]:
    """Row numbers of each split."""
    problems = []
    counts: dict[str, int] = {}
    for split, size in sizes.items():
        is_share = isinstance(size, float)
        if size <= 0 or (is_share and size > 1):
            problems.append(
                f"{name}: splits: {split} is {size}; expected a share up to 1.0 or a number of rows"
            )
        counts[split] = int(size * num_rows) if is_share else int(size)
    # Shares that sum to one leave no row over.
    are_shares = not problems and all(isinstance(s, float) for s in sizes.values())
    if are_shares and abs(sum(sizes.values()) - 1) < 1e-9:
        counts[next(iter(counts))] += num_rows - sum(counts.values())
    if not problems and sum(counts.values()) > num_rows:
        problems.append(
            f"{name}: splits: {sum(counts.values())} rows in all, and the data has {num_rows}"
        )
    empty = [split for split, count in counts.items() if count < 1]
    if empty and not problems:
        problems.append(f"{name}: splits: of {num_rows} rows none is left for {', '.join(empty)}")
    if problems:
        raise DataError(problems)
    order = list(range(num_rows))
    random.Random(seed).shuffle(order)
    result, start = {}, 0
    for split, count in counts.items():
        result[split] = order[start : start + count]
        start += count
    return result


class _Chosen(Sequence[Mapping[str, Any]]):
    """Some rows of others, read when they are asked for."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> None:
        self._rows, self._numbers = rows, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._rows[n] for n in self._numbers[index]]
        return self._rows[self._numbers[index]]
