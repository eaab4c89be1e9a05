"""Statistics as one safetensors file: arrays, and the header as JSON in its metadata."""

import contextlib
import errno
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from matsmerge.checkpoints.checkpoint import dtype_name, first_line
from matsmerge.checkpoints.opening import local_path
from matsmerge.checkpoints.safetensors_header import read_header
from matsmerge.checkpoints.stored import StoredCheckpoint
from matsmerge.errors import CheckpointError, OutputError, RecipeError, StatisticsError
from matsmerge.statistics.statistics import FORMAT_VERSION, Header, Statistics

_METADATA_KEY = "matsmerge_statistics"
_PROGRESS_KEY = "matsmerge_progress"
# Not float16: squared gradients are smaller than its smallest number.
_DTYPES = {dtype_name(d): d for d in (torch.float32, torch.bfloat16, torch.float64)}


def parse_dtype(name: str) -> torch.dtype:
    """The dtype arrays are to be stored in."""
    if name not in _DTYPES:
        raise RecipeError(
            f"dtype: statistics are stored as {', '.join(_DTYPES)}, found '{name}'"
            + ("; its smallest numbers are too large for gradients" if name == "float16" else "")
        )
    return _DTYPES[name]


def is_statistics_file(path: str | Path) -> bool:
    """Is this a file of statistics rather than a checkpoint?"""
    file = local_path(path)
    if file.suffix != ".safetensors" or not file.is_file():
        return False
    with contextlib.suppress(CheckpointError):
        return _METADATA_KEY in read_header(file).metadata
    return False


def open_statistics(path: str | Path) -> Statistics:
    """Read and check a header; arrays are read when they are asked for."""
    file = local_path(path)
    if not file.is_file():
        raise StatisticsError(f"{path}: no such file")
    metadata = read_header(file).metadata
    if _METADATA_KEY not in metadata:
        raise StatisticsError(
            f"{path}: holds no statistics (is it a model?); `mats collect` writes files that do"
        )
    arrays = StoredCheckpoint(str(path), [file], None)
    arrays.aliases = {}
    arrays.place = file
    header = _parse(path, metadata[_METADATA_KEY])
    missing = [
        f"{path}: array '{name}' is missing; it was damaged or edited, collect it again"
        for name in header.forms
        if name not in arrays.specs
    ]
    if missing:
        raise StatisticsError(missing)
    return Statistics(header, arrays, json.loads(metadata.get(_PROGRESS_KEY, "{}")))


def _parse(path: str | Path, text: str) -> Header:
    try:
        content = json.loads(text)
        version = content["format_version"]
        if not isinstance(version, int):
            raise TypeError("format_version is not a number")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StatisticsError(f"{path}: damaged header ({first_line(error)})") from error
    if version > FORMAT_VERSION:
        raise StatisticsError(
            f"{path}: written in format {version} by a newer matsmerge; this version reads up to "
            f"format {FORMAT_VERSION}, upgrade it (pip install --upgrade matsmerge)"
        )
    try:
        return Header.model_validate(content)
    except ValidationError as error:
        e = error.errors()[0]
        where = ".".join(map(str, e["loc"]))
        raise StatisticsError(f"{path}: damaged header ({where}: {e['msg'].lower()})") from error


def save_statistics(
    statistics: Statistics,
    path: str | Path,
    dtype: str = "float32",
    progress: Mapping[str, object] | None = None,
) -> None:
    """Write a file that is complete or not there."""
    stored = parse_dtype(dtype)
    file = local_path(path)
    arrays: dict[str, Tensor] = {}
    for name in statistics.arrays.specs:
        values = statistics.arrays[name]
        arrays[name] = values.to(stored).contiguous() if values.is_floating_point() else values
    metadata = {_METADATA_KEY: statistics.header.model_dump_json()}
    if progress is not None:
        metadata[_PROGRESS_KEY] = json.dumps(progress)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, temporary, metadata=metadata)
        temporary.chmod(0o666 & ~_umask())  # safetensors makes files that only their owner reads
        _sync(temporary)
        temporary.replace(file)
        _sync(file.parent)
    except (OSError, SafetensorError) as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        full = full or "No space left" in str(error)
        reason = "the disk is full" if full else first_line(error)
        raise OutputError(f"{path}: cannot be written ({reason})") from error
    finally:  # also when interrupted
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    """What new files may not be; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
