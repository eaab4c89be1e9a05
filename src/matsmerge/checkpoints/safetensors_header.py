"""The header of a safetensors file, read and written.

We parse the header ourselves rather than through the safetensors library because we need the
byte offsets: tensors are then read with `pread` in small pieces (a memory map would count
towards resident memory and turn a truncated file into a crash) and written in any order
into a file whose header is already there.
"""

import io
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import AfterValidator, Field

from matsmerge.checkpoints.checkpoint import CONVERT, DTYPES, QUANTIZED_DTYPES, TensorSpec
from matsmerge.errors import CheckpointError
from matsmerge.files.guarded_files import (
    Content,
    Count,
    decode_text,
    open_regular,
    parse_as,
    parse_json,
    quoted,
    reading,
)
from matsmerge.files.mirror import remote_file
from matsmerge.files.remote_file import RemoteFile

_READABLE = {**DTYPES, **QUANTIZED_DTYPES}
_CODES = {dtype: code for code, dtype in _READABLE.items()}
_MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 250_000  # of one model; the largest have some 150,000
_MAX_VALUES = 12 * MAX_TENSORS  # in a header's JSON; each may take a hundred bytes
# Also an empty tensor's other dimensions are multiplied by those who load it, numpy for one, and
# must not overflow for the widest dtype.
_MAX_ELEMENTS = (2**63 - 1) // 8
_MAX_DIMENSIONS = 64  # numpy's limit
_FETCHED_BYTES = 32_768  # of a remote file, with the first request


@dataclass(frozen=True)
class SafetensorsHeader:
    """Tensors of a file in the order of their bytes, and where each begins."""

    specs: Mapping[str, TensorSpec]
    offsets: Mapping[str, int]  # from the beginning of the file
    metadata: Mapping[str, str]


def _mergeable(dtype: str) -> str:
    if dtype not in _READABLE:
        raise ValueError(CONVERT)
    return dtype


def _loadable(shape: list[int]) -> list[int]:
    if math.prod(n for n in shape if n) > _MAX_ELEMENTS:
        raise ValueError(
            f"nothing can load {quoted(tuple(shape))}, whose dimensions other than zero multiply "
            f"to more than {_MAX_ELEMENTS}"
        )
    return shape


class _TensorEntry(Content):
    """What a header says of a tensor."""

    dtype: Annotated[str, AfterValidator(_mergeable)]
    shape: Annotated[list[Count], Field(max_length=_MAX_DIMENSIONS), AfterValidator(_loadable)]
    data_offsets: Annotated[list[Count], Field(min_length=2, max_length=2)]


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check a header; a damaged or truncated file is a `CheckpointError`."""
    raw, size = _read(path)
    where = f"{path}: damaged header"
    text = decode_text(raw, where, CheckpointError)
    content = parse_json(text, where, CheckpointError, _MAX_VALUES, unique=True)
    content = parse_as(content, dict[str, Any], where, CheckpointError)
    metadata = content.pop("__metadata__", None) or {}
    metadata = parse_as(metadata, dict[str, Any], f"{where}: __metadata__", CheckpointError)
    if len(content) > MAX_TENSORS:
        raise CheckpointError(too_many_tensors(path))
    entries = parse_as(content, dict[str, _TensorEntry], where, CheckpointError)

    specs: dict[str, TensorSpec] = {}
    offsets: dict[str, int] = {}
    data_start = 8 + len(raw)
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        spec = TensorSpec(_READABLE[entry.dtype], tuple(entry.shape))
        begin, end = entry.data_offsets
        if begin != position or end - begin != spec.num_bytes:
            raise CheckpointError(
                f"{path}: tensor '{name}' ({spec}, {spec.num_bytes} bytes) is said to lie at bytes "
                f"{begin} to {end}; expected {position} to {position + spec.num_bytes}"
            )
        specs[name] = spec
        offsets[name] = data_start + begin
        position = end
    if data_start + position != size:
        raise CheckpointError(
            f"{path}: {'truncated' if size < data_start + position else 'has bytes left over'}: "
            f"its header describes {data_start + position} bytes, the file has {size}; "
            "download or save it again"
        )
    return SafetensorsHeader(specs, offsets, {str(k): str(v) for k, v in metadata.items()})


def has_metadata(path: Path, key: str) -> bool:
    """Does a file have metadata of this name? A header that cannot hold it is not parsed."""
    return key.encode() in _read(path)[0] and key in read_header(path).metadata


def _read(path: Path) -> tuple[bytes, int]:
    """The bytes of a header, and the size of its file."""
    with reading(path, CheckpointError):
        remote = remote_file(path)
    with reading(path, CheckpointError), _opened(path, remote) as file:
        size = remote.state.size if remote else os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: truncated, only {size} bytes")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: not a safetensors file or truncated "
                f"(header of {length} bytes in a file of {size}); download or save it again"
            )
        if remote and 8 + length > _FETCHED_BYTES:
            return remote.read(8, 8 + length), size
        return file.read(length), size


def _opened(path: Path, remote: RemoteFile | None) -> IO[bytes]:
    """The file; of a remote one its beginning, which most headers fit into."""
    if remote is None:
        return open_regular(path, CheckpointError)
    return io.BytesIO(remote.read(0, min(_FETCHED_BYTES, remote.state.size)))


def too_many_tensors(path: Path) -> str:
    """What to say of a model with more tensors than we read."""
    return f"{path}: its header describes more than {MAX_TENSORS:,} tensors; is it a model?"


def encode_header(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The bytes that begin a file with these tensors, and each tensor's offset in the file."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins: dict[str, int] = {}
    position = 0
    for name, spec in specs.items():
        begins[name] = position
        position += spec.num_bytes
        entries[name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begins[name], position],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Readers expect the data to begin at a multiple of eight bytes.
    text = text.ljust(math.ceil(len(text) / 8) * 8)
    encoded = struct.pack("<Q", len(text)) + text
    return encoded, {name: len(encoded) + begin for name, begin in begins.items()}
