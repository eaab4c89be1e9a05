"""Rows from text files: JSON, JSON lines, CSV and TSV, plain or gzipped."""

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matsmerge.data.measured_text import MAX_LINE_BYTES, MeasuredText, measure_text
from matsmerge.data.row_problems import ENOUGH, describe_value, refuse
from matsmerge.errors import DataError

ParsedRow = dict[str, Any]

_MAX_ARRAY_BYTES = 128 * 2**20  # of JSON that is one list, which is parsed as a whole
_MAX_ARRAY_VALUES = 8_000_000
_MAX_COLUMNS = 10_000
_BLANK = " \t\n\r"


def _json(path: Path) -> list[ParsedRow]:
    """A list of objects, or an object per line."""
    text = measure_text(path, has_lines=False)
    with text.opened(newline="") as file:
        while (first := file.read(1)) and first in _BLANK:
            pass
    return _json_array(text) if first == "[" else _json_lines(path)


def _json_array(text: MeasuredText) -> list[ParsedRow]:
    path = text.path
    advice = "write an object per line (jq -c '.[]'), which is read line by line"
    if text.num_bytes > _MAX_ARRAY_BYTES:
        raise DataError(f"{path}: a list of more than {_MAX_ARRAY_BYTES:,} bytes; {advice}")
    with text.opened(newline="") as file:
        content = file.read()
    if sum(map(content.count, "[{,")) > _MAX_ARRAY_VALUES:
        raise DataError(f"{path}: a list of more than {_MAX_ARRAY_VALUES:,} values; {advice}")
    try:
        rows = json.loads(content)
    except ValueError as error:
        raise DataError(f"{path}: damaged JSON ({error})") from error
    except RecursionError as error:
        raise DataError(f"{path}: damaged JSON (nested too deeply)") from error
    refuse(
        f"{path}: item {n}: expected an object, found {describe_value(row)}"
        for n, row in enumerate(rows, 1)
        if not isinstance(row, dict)
    )
    return list(rows)


def _json_lines(path: Path) -> list[ParsedRow]:
    rows: list[ParsedRow] = []
    problems: list[str] = []
    # Not universal newlines: JSON strings may hold other line separators as they are.
    with measure_text(path).opened(newline="\n") as file:
        for number, line in enumerate(file, 1):
            if len(problems) >= ENOUGH:
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                problems.append(
                    f"{path}: line {number}: expected one JSON object per line, found damaged JSON "
                    f"({what}): {line.strip()[:60]}"
                )
                continue
            if isinstance(row, dict):
                rows.append(row)
            else:
                problems.append(
                    f"{path}: line {number}: expected an object, found {describe_value(row)}"
                )
    refuse(problems)
    return rows


def _delimited(path: Path, delimiter: str) -> list[ParsedRow]:
    """Rows under a header line; all values are strings."""
    limit = csv.field_size_limit(MAX_LINE_BYTES)  # Python's own is 128 KiB
    rows: list[ParsedRow] = []
    problems: list[str] = []
    try:
        with measure_text(path).opened(newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            try:
                header = _header(path, next(reader, []))
                for fields in reader:
                    if len(problems) >= ENOUGH:
                        break
                    if len(fields) == len(header):
                        rows.append(dict(zip(header, fields, strict=True)))
                    elif fields:
                        problems.append(
                            f"{path}: line {reader.line_num}: expected {len(header)} fields as in "
                            f"the header, found {len(fields)}"
                        )
            except csv.Error as error:
                problems.append(f"{path}: line {reader.line_num}: {error}")
    finally:
        csv.field_size_limit(limit)
    refuse(problems)
    return rows


def _header(path: Path, names: list[str]) -> list[str]:
    if len(names) > _MAX_COLUMNS:
        raise DataError(f"{path}: line 1: has {len(names):,} columns, at most {_MAX_COLUMNS:,} do")
    if len(set(names)) < len(names) or "" in names:
        raise DataError(
            f"{path}: line 1: expected a header with a different name for each column, "
            f"found {describe_value(names)}"
        )
    return names


TEXT_FORMATS: dict[str, Callable[[Path], list[ParsedRow]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": partial(_delimited, delimiter=","),
    ".tsv": partial(_delimited, delimiter="\t"),
}
