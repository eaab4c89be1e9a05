"""Statistics as one safetensors file: arrays, and the header as JSON in its metadata."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from matsmerge.checkpoints.checkpoint import TensorSpec, dtype_name
from matsmerge.checkpoints.safetensors_header import encode_header, has_metadata, read_header
from matsmerge.checkpoints.source import local_path
from matsmerge.checkpoints.stored import StoredCheckpoint
from matsmerge.errors import CheckpointError, RecipeError, StatisticsError
from matsmerge.files.guarded_files import parse_as, parse_json, reading
from matsmerge.files.mirror import fetch_path
from matsmerge.files.whole_outputs import whole_file, writing
from matsmerge.linalg.triangle import is_triangle
from matsmerge.statistics.coded_sketches import (
    CODES,
    coded_specs,
    decode_sketches,
    encode_sketch,
)
from matsmerge.statistics.kinds import KINDS, kind_of
from matsmerge.statistics.kinds.statistic import Form, InputStatistic, OutputStatistic
from matsmerge.statistics.statistics import (
    CODED_VERSION,
    PLAIN_VERSION,
    Header,
    Sketching,
    Statistics,
)

BESIDE = "statistics.safetensors"  # looked for beside a model

_METADATA_KEY = "matsmerge_statistics"
_IDENTITY_KEY = "matsmerge_collection"  # a digest, by which --resume knows what is finished
# Not float16: squared gradients are smaller than its smallest number.
_DTYPES = {dtype_name(d): d for d in (torch.float32, torch.bfloat16, torch.float64)}


def parse_dtype(name: str, form: Form = "full") -> torch.dtype:
    """The dtype arrays of a form are to be stored in; `auto` rounds sketches and nothing else."""
    if name == "auto":
        return CODES if form == "sketch" else torch.float32
    if name not in _DTYPES:
        raise RecipeError(
            f"dtype: statistics are stored as auto, {', '.join(_DTYPES)}, found '{name}'"
            + ("; its smallest numbers are too large for gradients" if name == "float16" else "")
        )
    return _DTYPES[name]


def is_statistics_file(path: str | Path) -> bool:
    """Is this a file of statistics rather than a checkpoint?"""
    file = local_path(path)
    with reading(path, CheckpointError):
        if file.suffix != ".safetensors" or not fetch_path(file).is_file():
            return False
    with contextlib.suppress(CheckpointError):
        return has_metadata(file, _METADATA_KEY)
    return False


def open_statistics(path: str | Path, *, is_part: bool = False) -> Statistics:
    """Read and check a header; arrays are read when they are asked for.

    What a part of the data gave is still to be added up, so its sketches are wide.
    """
    file = local_path(path)
    with reading(path, StatisticsError):
        fetch_path(file)
    if not file.is_file():
        what = "no file of statistics" if file.exists() else "no such file"
        raise StatisticsError(f"{path}: {what}; `mats collect` writes one, NAME.safetensors")
    metadata = read_header(file).metadata
    if _METADATA_KEY not in metadata:
        raise StatisticsError(
            f"{path}: holds no statistics (is it a model?); `mats collect` writes files that do"
        )
    arrays = StoredCheckpoint(str(path), [file], None)
    arrays.aliases = {}
    arrays.place = file
    header = _parse(path, metadata[_METADATA_KEY])
    decoded = decode_sketches(arrays, header.forms)
    problems = list(_problems(header, decoded.specs, is_part))
    if problems:
        raise StatisticsError(
            [f"{path}: {p}; it was damaged or edited, collect it again" for p in problems[:10]]
        )
    return Statistics(header, decoded)


class _Versioned(BaseModel):
    """What a header of any version has."""

    format_version: Annotated[int, Field(strict=True, ge=1)]


def _parse(path: str | Path, text: str) -> Header:
    where = f"{path}: damaged header"
    content = parse_json(text, where, StatisticsError)
    version = parse_as(content, _Versioned, where, StatisticsError).format_version
    if version > CODED_VERSION:
        raise StatisticsError(
            f"{path}: written in format {version} by a newer matsmerge; this "
            f"version reads up to format {CODED_VERSION}, upgrade it (pip install --upgrade "
            "matsmerge)"
        )
    return parse_as(content, Header, where, StatisticsError)


def _problems(header: Header, specs: Mapping[str, TensorSpec], is_part: bool) -> Iterator[str]:
    """Where a header and its arrays do not fit together."""
    for full, form in header.forms.items():
        of, _, key = full.partition("/")
        array = key.partition("/")[0]
        kind = kind_of(array)
        if of not in header.sets or kind is None:
            yield f"array '{full}' is of no set or kind that there is"
        elif full not in specs:
            yield f"array '{full}' is missing"
        elif (
            form not in kind.arrays[array]
            or not _has_form(specs[full], form, header.sketching)
            or (form == "wide" and not is_part)
        ):
            yield f"array '{full}' ({specs[full]}) has not the form '{form}' that it should"
        elif kind.is_per_row and array == kind.array and not header.sets[of].num_rows.get(key):
            yield f"there is no number of rows for '{full}'"
        elif not header.sets[of].num_examples:
            yield f"the set '{of}' has arrays and no examples"
    for m in header.maps:
        for watching in (InputStatistic, OutputStatistic):
            found = [kind.key(m) for kind in KINDS.values() if isinstance(kind, watching)]
            keys = [one for one in found if one is not None]
            if keys and not any(f"{of}/{k}" in header.forms for of in header.sets for k in keys):
                yield f"there is no array '{keys[0]}' of the map '{m.module}'"


def _has_form(spec: TensorSpec, form: Form, sketching: Sketching | None) -> bool:
    if not spec.dtype.is_floating_point:
        return False
    if form == "wide":
        return len(spec.shape) == 2
    if form == "sketch":
        return (
            sketching is not None and len(spec.shape) == 2 and spec.shape[1] == sketching.rank + 1
        )
    if form == "symmetric":
        return 1 <= len(spec.shape) <= 2 and is_triangle(spec.shape[-1])
    dims = {"diagonal": 1, "rows": 2}
    return len(spec.shape) == dims.get(form, len(spec.shape))


def read_identity(path: Path) -> str | None:
    """The identity of the collection that wrote a file; None if none did."""
    if not path.is_file():
        return None
    with contextlib.suppress(CheckpointError):
        return read_header(path).metadata.get(_IDENTITY_KEY)
    return None


def save_statistics(
    statistics: Statistics,
    path: str | Path,
    dtype: str = "auto",
    *,
    identity: str | None = None,
) -> None:
    """Write a file that is complete or not there; `identity` is that of its collection."""
    arrays, forms = statistics.arrays, statistics.header.forms
    dtypes = {
        name: parse_dtype(dtype, forms[name]) if spec.dtype.is_floating_point else spec.dtype
        for name, spec in arrays.specs.items()
    }
    specs: dict[str, TensorSpec] = {}
    for name, spec in arrays.specs.items():
        own = replace(spec, dtype=dtypes[name])
        specs |= coded_specs(name, spec) if own.dtype == CODES else {name: own}

    def values() -> Iterator[Tensor]:
        for name, stored_as in dtypes.items():
            if stored_as == CODES:
                yield from encode_sketch(name, arrays[name]).values()
            else:
                yield arrays[name].to(stored_as)

    version = CODED_VERSION if CODES in dtypes.values() else PLAIN_VERSION
    header = statistics.header.model_copy(update={"format_version": version})
    metadata = {_METADATA_KEY: header.model_dump_json()}
    if identity is not None:
        metadata[_IDENTITY_KEY] = identity
    _write(local_path(path), specs, values(), metadata)


def write_arrays(file: Path, arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file that is complete or not there; the same bytes for the same arrays.

    Not by the library: it puts metadata in an order that changes from run to run.
    """
    specs = {name: TensorSpec(v.dtype, tuple(v.shape)) for name, v in arrays.items()}
    _write(file, specs, arrays.values(), metadata)


def _write(
    file: Path,
    specs: Mapping[str, TensorSpec],
    arrays: Iterable[Tensor],  # one at a time in memory
    metadata: Mapping[str, str],
) -> None:
    encoded, _ = encode_header(specs, metadata)
    with writing(file), whole_file(file) as opened:
        opened.write(encoded)
        for values in arrays:
            opened.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
