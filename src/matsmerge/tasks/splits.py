"""The parts of a task's data: training, validation, test, or whatever they are called."""

import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from matsmerge.data.datasets_library import LazyRows
from matsmerge.data.row_problems import refuse
from matsmerge.data.rows import Data, read_data
from matsmerge.errors import DataError, closest
from matsmerge.tasks.task_file import TaskFile

_APART = ("train", "validation", "test")  # must not share rows
_PART = re.compile(r"(?P<name>[^\[\]]+)\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]")


def read_split(task: TaskFile, split: str | None = None) -> Data:
    """The rows of a split; of a task without splits, all rows.

    Splits that are made from one source never share a row, and are the same every time.
    """
    split = split or task.split
    return replace(_with_fields(_read(task, split), task), split=split)


def read_source(task: TaskFile, split: str | None) -> Data | None:
    """All rows of what a split is cut from, as they are stored; None where it is no part of it."""
    size = (task.splits or {}).get(split or "")
    if size is None or not isinstance(task.data, str):
        return None
    if isinstance(size, str):
        return read_data(task.data, split=_part(task.title, split or "", size)[0])
    return read_data(task.data)


def _read(task: TaskFile, split: str | None) -> Data:
    name, source = task.title, task.data
    if source is None:
        raise DataError(f"{name}: names no data; add a line data: FILE")
    if isinstance(source, str) and task.splits is None:
        return read_data(source, split=split)
    if isinstance(source, Mapping) and task.splits is not None:
        raise DataError(f"{name}: has a source for each split, and splits: too; leave out one")
    known: Mapping[str, Any] = source if isinstance(source, Mapping) else task.splits or {}
    if split is None:
        raise DataError(
            f"{name}: has the splits {', '.join(known)}; say which one to use (--split, `split:`)"
        )
    if split not in known:
        raise DataError(f"{name}: has no split '{split}', only {', '.join(known)}")
    if isinstance(source, Mapping):
        return read_data(source[split])
    if isinstance(known[split], str):
        data, part = _named_part(name, source, known, split)
    else:
        data = read_data(source)
        part = _cut(name, len(data), known)[split]
    if part is None:
        return data
    order = list(range(len(data)))
    random.Random(task.seed).shuffle(order)
    rows = LazyRows(len(part), lambda i: data.rows[order[part[i]]])
    return replace(data, name=f"{data.name} ({split})", rows=rows)


def _named_part(
    name: str, source: str, splits: Mapping[str, str], split: str
) -> tuple[Data, range | None]:
    """The source's split and the range of its rows that is meant; parts may not overlap."""
    parts = {s: _part(name, s, wanted) for s, wanted in splits.items()}
    whole, _ = parts[split]
    data = read_data(source, split=whole)
    slices = {s: part for s, (of, part) in parts.items() if of == whole}
    if all(part is None for part in slices.values()):
        same = [s for s in slices if s in _APART]
        if len(same) > 1 and split in same:
            raise DataError(f"{name}: splits: {' and '.join(same)} are all of '{whole}'; use parts")
        return data, None
    ranges = {s: range(len(data))[part or slice(None)] for s, part in slices.items()}
    chosen = ranges[split]
    problems = [
        f"{name}: splits: {split} and {other} share rows of '{whole}', which has {len(data)}"
        for other, rows in ranges.items()
        if other != split and max(chosen.start, rows.start) < min(chosen.stop, rows.stop)
    ]
    if not chosen:
        problems.append(f"{name}: splits: of {len(data)} rows none is left for {split}")
    refuse(problems)
    return data, chosen


def _part(name: str, split: str, wanted: str) -> tuple[str, slice | None]:
    """Parse `train[1000:]` to `("train", slice(1000, None))`, and `train` to `("train", None)`."""
    found = _PART.fullmatch(wanted)
    if found is not None:
        return found["name"], slice(*(n and int(n) for n in (found["start"], found["stop"])))
    if "[" in wanted:
        raise DataError(
            f"{name}: splits: {split} is '{wanted}'; expected the name of a split in the data, or "
            "a part of one as in train[1000:]"
        )
    return wanted, None


def _cut(name: str, num_rows: int, sizes: Mapping[str, float | int]) -> dict[str, range]:
    """Which rows each split gets."""
    refuse(
        f"{name}: splits: {split} is {size}; expected a share up to 1.0 or a number of rows"
        for split, size in sizes.items()
        if not 0 < size <= (1 if isinstance(size, float) else sys.maxsize)
    )
    counts = {s: int(n * num_rows) if isinstance(n, float) else n for s, n in sizes.items()}
    # Shares that sum to one leave no row over.
    are_shares = all(isinstance(size, float) for size in sizes.values())
    if are_shares and abs(sum(sizes.values()) - 1) < 1e-9:
        counts[next(iter(counts))] += num_rows - sum(counts.values())
    total = sum(counts.values())
    if total > num_rows:
        raise DataError(f"{name}: splits: {total} rows in all, and the data has {num_rows}")
    if empty := [split for split, count in counts.items() if count < 1]:
        raise DataError(f"{name}: splits: of {num_rows} rows none is left for {', '.join(empty)}")
    stops = accumulate(counts.values())
    return {s: range(stop - counts[s], stop) for s, stop in zip(counts, stops, strict=True)}


def _with_fields(data: Data, task: TaskFile) -> Data:
    """Data with the task's fields as columns, and numbers for the names of choices."""
    label = task.columns.get("label", "label")
    names = task.labels if task.kind is not None and task.kind.labels_name_choices else None
    problems = [
        f"{data.name}: fields: '{field}' is a column of the data already; choose another name"
        for field in task.fields
        if field in data.columns
    ]
    for field, path in task.fields.items():
        first = path.split(".")[0]
        if first not in data.columns:
            near = closest(first, data.columns)
            problems.append(f"{data.name}: has no column '{first}', where '{field}' is{near}")
    refuse(problems)
    if not task.fields and not names:
        return data

    def extend(row: Mapping[str, Any]) -> dict[str, Any]:
        own = {**row, **{f: _reach(row, path.split(".")) for f, path in task.fields.items()}}
        return own | {label: _number(own[label], names)} if names and label in own else own

    rows = LazyRows(len(data), lambda i: extend(data.rows[i]))
    return replace(data, columns=[*data.columns, *task.fields], rows=rows)


def _reach(value: Any, path: Sequence[str]) -> Any:
    """What is at the end of a path of keys and positions; None if it leads nowhere."""
    for key in path:
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, (list, tuple)) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _number(label: Any, names: Sequence[str]) -> Any:
    """The number of the choice that a label names; where names are digits, so are numbers."""
    are_numbers = any(name.isdecimal() for name in names)
    if str(label) in names and (are_numbers or isinstance(label, str)):
        return names.index(str(label))
    return f"{label} (none of labels:)" if are_numbers else label
