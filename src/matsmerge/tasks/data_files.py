"""Rows from text files: JSON, JSON lines, CSV and TSV, plain or gzipped."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matsmerge.errors import DataError
from matsmerge.tasks.problems import describe, shorten

Row = dict[str, Any]

_MAX_FIELD = 2**31 - 1  # Python's own limit for a field of a CSV file is 128 KiB


def read_text_file(path: Path, suffix: str) -> list[Row]:
    """All rows of a file whose format is that of the suffix."""
    return TEXT_FORMATS[suffix](path, _text(path))


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if path.suffix.lower() == ".gz":
            content = gzip.decompress(content)
    except EOFError as error:
        raise DataError(f"{path}: is cut short; copy or download it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a valid gzip file ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}: line {line}: expected UTF-8 text, found the byte "
            f"0x{content[error.start]:02x} at position {error.start}; convert the file to UTF-8"
        ) from error


def _json(path: Path, text: str) -> list[Row]:
    """A list of objects, or an object per line."""
    if not text.lstrip().startswith("["):
        return _json_lines(path, text)
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: damaged JSON ({error})") from error
    except RecursionError as error:
        raise DataError(f"{path}: damaged JSON (nested too deeply)") from error
    problems = [
        f"{path}: item {n}: expected an object, found {describe(row)}"
        for n, row in enumerate(rows, 1)
        if not isinstance(row, dict)
    ]
    if problems:
        raise DataError(shorten(problems))
    return list(rows)


def _json_lines(path: Path, text: str) -> list[Row]:
    rows: list[Row] = []
    problems: list[str] = []
    # Not `splitlines`: JSON strings may hold other line separators as they are.
    for number, line in enumerate(text.split("\n"), 1):
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
            problems.append(f"{path}: line {number}: expected an object, found {describe(row)}")
    if problems:
        raise DataError(shorten(problems))
    return rows


def _csv(path: Path, text: str) -> list[Row]:
    return _delimited(path, text, ",")


def _tsv(path: Path, text: str) -> list[Row]:
    return _delimited(path, text, "\t")


def _delimited(path: Path, text: str, delimiter: str) -> list[Row]:
    """Rows under a header line; all values are strings."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(_MAX_FIELD)
    rows: list[Row] = []
    problems: list[str] = []
    try:
        header = next(reader, [])
        if len(set(header)) < len(header) or "" in header:
            raise DataError(
                f"{path}: line 1: expected a header with a different name for each column, "
                f"found {header}"
            )
        for fields in reader:
            if len(fields) == len(header):
                rows.append(dict(zip(header, fields, strict=True)))
            elif fields:
                problems.append(
                    f"{path}: line {reader.line_num}: expected {len(header)} fields as in the "
                    f"header, found {len(fields)}"
                )
    except csv.Error as error:
        problems.append(f"{path}: line {reader.line_num}: {error}")
    finally:
        csv.field_size_limit(limit)
    if problems:
        raise DataError(shorten(problems))
    return rows


TEXT_FORMATS: dict[str, Callable[[Path, str], list[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
}
