"""Data: rows with named columns, from a file, a folder or the hub."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.source import local_path
from matsmerge.data.datasets_library import (
    hub_cache,
    is_saved_dataset,
    load_hub_dataset,
    load_saved_dataset,
    read_parquet,
)
from matsmerge.data.image_files import IMAGE_SUFFIXES, contained_file, read_image_folder
from matsmerge.data.text_rows import TEXT_FORMATS
from matsmerge.errors import DataError
from matsmerge.files.mirror import fetch_path

_HUB_NAME = re.compile(
    r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?"
)


@dataclass(frozen=True)
class Data:
    """Rows in the order in which they are stored; example n is `rows[n]`.

    `folder` is what paths of images in the rows are relative to, if there is one.
    """

    name: str
    columns: list[str]
    rows: Sequence[Mapping[str, Any]]
    folder: Path | None = None
    split: str | None = None  # which one of its task's it is

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same rows in the same order, wherever they are stored."""
        return fingerprint_rows(self.rows, self.folder)

    def labels_left_out(self, column: str, numbers: Sequence[int]) -> str | None:
        """What some rows lack of the labels in a column: a file may be sorted by label."""
        if len(numbers) == len(self) or column not in self.columns:
            return None
        if not isinstance(self.rows, list):  # reading all of them would take long
            return None
        everywhere = {str(row.get(column)) for row in self.rows}
        missing = everywhere - {str(self.rows[n].get(column)) for n in numbers}
        if not missing:
            return None
        return f"have none of {len(missing)} of the {len(everywhere)} labels; is the file sorted?"


def read_data(source: str | Path, *, split: str | None = None) -> Data:
    """Open data.

    JSON (a list, or an object per line), CSV and TSV, each also gzipped; Parquet; a folder written
    by `Dataset.save_to_disk`; a folder with a subfolder of images per class; or a dataset on the
    hub as `owner/name`, `owner/name:config` or `owner/name@revision`. Code is never run.
    """
    path = local_path(source)
    name = str(source)
    try:
        fetch_path(path, whole=True)
        is_file, is_folder, is_there = path.is_file(), path.is_dir(), path.exists()
    except (OSError, ValueError) as error:  # also names that cannot be those of files
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{name!r}: cannot be read ({reason})") from error
    if is_file:
        data = _read_file(name, path, split)
    elif is_folder:
        data = _read_folder(name, path, split)
    elif is_there:
        raise DataError(f"{name}: is no regular file; save the data to a file first")
    elif (hub := _HUB_NAME.fullmatch(name)) and not _is_named_as_file(path):
        columns, rows = load_hub_dataset(hub["name"], hub["config"], hub["revision"], split)
        data = Data(name, columns, rows, hub_cache())
    else:
        raise DataError(
            f"{name}: no such file or folder (a dataset on the hub would look like 'owner/name')"
        )
    if not data.rows:
        raise DataError(f"{name}: holds no rows")
    return data


def fingerprint_rows(rows: Iterable[Mapping[str, Any]], folder: Path | None = None) -> str:
    """SHA-256 over the canonical JSON of each row, images and other bytes by their content.

    A string that names an image inside `folder` stands for that image.
    """
    digest = hashlib.sha256()
    for row in rows:
        plain = _plain(row, folder)
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _is_named_as_file(path: Path) -> bool:
    return _kind_of_file(path) in (*TEXT_FORMATS, ".parquet")


def _kind_of_file(path: Path) -> str:
    """Its suffix, that of a gzipped text without `.gz`; empty if it has none."""
    name = path.name.lower()
    kind = Path(name.removesuffix(".gz")).suffix
    return "" if kind == ".parquet" and name.endswith(".gz") else kind


def _read_file(name: str, path: Path, split: str | None) -> Data:
    if split is not None:
        raise DataError(f"{name}: is a single file, which has no split '{split}'")
    kind = _kind_of_file(path)
    if kind == ".parquet":
        columns, rows = read_parquet(path)
        return Data(name, columns, rows, path.parent)
    if kind not in TEXT_FORMATS:
        expected = ", ".join([*TEXT_FORMATS, ".parquet"])
        raise DataError(f"{name}: expected a file ending in {expected} (text also with .gz)")
    read = TEXT_FORMATS[kind](path)
    columns = list(dict.fromkeys(column for row in read for column in row))
    return Data(name, columns, read, path.parent)


def _read_folder(name: str, path: Path, split: str | None) -> Data:
    if is_saved_dataset(path):
        columns, rows = load_saved_dataset(path, split)
        return Data(name, columns, rows, path)
    folder = path / split if split and (path / split).is_dir() else path
    images = read_image_folder(folder)
    if images:
        if folder is path and split is not None:
            raise DataError(f"{name}: is a folder of images and has no subfolder '{split}'")
        return Data(name, ["image", "label"], images, folder)
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
    raise DataError(
        f"{folder}: expected a folder written by `Dataset.save_to_disk`, or one with a subfolder "
        f"of images ({', '.join(IMAGE_SUFFIXES)}) per class; found {found}"
    )


def _plain(value: Any, folder: Path | None) -> Any:
    """A value as JSON can say it."""
    if isinstance(value, str):
        if folder is not None and value.lower().endswith(IMAGE_SUFFIXES):
            file = contained_file(folder, value)
            if file is not None and file.is_file():
                with file.open("rb") as opened:
                    return {"sha256": hashlib.file_digest(opened, "sha256").hexdigest()}
        return value
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"}:  # how the datasets library stores images
            content = value["bytes"]
            return _plain(value["path"] if content is None else content, folder)
        return {str(key): _plain(item, folder) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, folder) for item in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _hashed(bytes(value))
    if hasattr(value, "tobytes") and hasattr(value, "mode"):  # a PIL image
        return [value.mode, list(value.size), _hashed(value.tobytes())]
    if hasattr(value, "tolist"):  # an array, or a single value of one
        return _plain(value.tolist(), folder)
    return str(value)  # dates and decimals


def _hashed(content: bytes) -> dict[str, str]:
    return {"sha256": hashlib.sha256(content).hexdigest()}
