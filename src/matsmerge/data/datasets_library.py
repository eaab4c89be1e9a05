"""Rows through the datasets library and its pyarrow: Parquet, saved folders, the hub."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matsmerge.data.row_problems import library_errors
from matsmerge.errors import DataError, closest
from matsmerge.optional_import import import_optional

Row = Mapping[str, Any]

# Of a Parquet file. What is small does no harm however well it compresses.
_MAX_RATIO, _SMALL_BYTES = 20, 64 * 2**20
_MAX_VALUES = 50_000_000


@dataclass(frozen=True, eq=False)
class LazyRows(Sequence[Row]):
    """So many rows, each made by a function when it is asked for."""

    num_rows: int
    get: Callable[[int], Row]

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.get(range(self.num_rows)[index])


def read_parquet(path: Path) -> tuple[list[str], LazyRows]:
    """Columns and rows of a Parquet file.

    Texts stay in the dictionaries that they are stored in: a text that is repeated a million
    times, which takes a few bytes in the file, then takes a few in memory.
    """
    parquet = import_optional("pyarrow.parquet")
    with library_errors(f"{path}: not a readable Parquet file"):
        with parquet.ParquetFile(path) as file:
            columns = _check_parquet(path, file)
        with parquet.ParquetFile(path, read_dictionary=columns) as file:
            table = file.read()
    return list(table.column_names), LazyRows(
        len(table), lambda i: table.slice(i, 1).to_pylist()[0]
    )


def _check_parquet(path: Path, file: Any) -> list[str]:
    """Refuse what takes far more memory than on disk; returns the columns of texts."""
    # Not from the metadata of single columns: on damage there pyarrow ends the process.
    metadata = file.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    num_values = metadata.num_rows * metadata.num_columns
    num_bytes = sum(group.total_byte_size for group in groups)
    stored_bytes = path.stat().st_size
    most = max(_SMALL_BYTES, _MAX_RATIO * stored_bytes)
    if num_bytes > most or num_values > _MAX_VALUES:
        raise DataError(
            f"{path}: {stored_bytes:,} bytes hold {num_values:,} values of {num_bytes:,} bytes in "
            f"all; expected at most {most:,} bytes, {_MAX_RATIO} times as many as are stored, and "
            f"{_MAX_VALUES:,} values; write fewer rows or columns to a file"
        )
    columns = [file.schema.column(i) for i in range(metadata.num_columns)]
    return sorted({c.path for c in columns if c.physical_type == "BYTE_ARRAY"})


def is_saved_dataset(folder: Path) -> bool:
    """Was the folder written by `save_to_disk`?"""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def load_saved_dataset(folder: Path, split: str | None) -> tuple[list[str], LazyRows]:
    """Columns and rows of a folder written by `save_to_disk`."""
    datasets = import_optional("datasets")
    with library_errors(f"{folder}: the dataset cannot be read"):
        loaded = datasets.load_from_disk(str(folder))
    return _rows(str(folder), loaded, split)


def load_hub_dataset(
    name: str, config: str | None, revision: str | None, split: str | None
) -> tuple[list[str], LazyRows]:
    """Columns and rows of a dataset on the hub; those that come as code are refused."""
    datasets = import_optional("datasets")
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if "trust_remote_code" in inspect.signature(datasets.load_dataset).parameters:
        options["trust_remote_code"] = False  # newer versions cannot run code at all
    with library_errors(
        f"{name}: no such local path, and the hub did not provide the dataset",
        "; check the spelling, the network, a configuration as in 'owner/name:config', and "
        "`hf auth login` for a private dataset",
    ):
        loaded = datasets.load_dataset(name, config, **options)
    return _rows(name, loaded, split)


def hub_cache() -> Path:
    """Where what was downloaded lies; images that are not in the rows themselves are in it."""
    return Path(import_optional("datasets").config.HF_CACHE_HOME)


def _rows(name: str, loaded: Any, split: str | None) -> tuple[list[str], LazyRows]:
    if isinstance(loaded, Mapping):
        names = list(loaded)
        if split is None and len(names) == 1:
            split = names[0]
        if split is None:
            raise DataError(f"{name}: has the splits {', '.join(names)}; choose one with --split")
        if split not in names:
            raise DataError(f"{name}: has no split '{split}'{closest(split, names)}")
        loaded = loaded[split]
    elif split is not None and str(loaded.split) != split:
        raise DataError(f"{name}: is a single dataset, which has no split '{split}'")
    image = import_optional("datasets").Image
    for column, feature in loaded.features.items():
        if isinstance(feature, image):  # decoded later, one batch at a time
            loaded = loaded.cast_column(column, image(decode=False))
    return list(loaded.column_names), LazyRows(len(loaded), loaded.__getitem__)
