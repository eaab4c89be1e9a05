"""Labelled images as data of a task."""

import gzip
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from matsmerge.errors import DataError
from matsmerge.experiments.sources.settings import read_settings
from matsmerge.tasks.optional_import import import_optional

DATA = "data.parquet"
SIZE = 32  # pixels on a side; smaller images get a black margin

Images = npt.NDArray[np.uint8]  # (images, height, width), or with 3 colours at the end


def write_images(
    folder: Path, settings: Mapping[str, Any], images: Images, labels: Sequence[str]
) -> None:
    """Images and labels as `data.parquet`, in a random order that is always the same.

    Each image is there once, so that no split can hold an image of another. The setting `num_rows`
    says how many at most.
    """
    num_rows = read_settings(settings, {"num_rows": None})["num_rows"]
    seen: set[bytes] = set()
    chosen: list[dict[str, Any]] = []
    for n in np.random.default_rng(0).permutation(len(images)):
        if len(chosen) == num_rows:
            break
        content = images[n].tobytes()
        if content not in seen:
            seen.add(content)
            chosen.append({"image": _png(images[n]), "label": labels[n]})
    folder.mkdir(parents=True, exist_ok=True)
    table = import_optional("pyarrow").Table.from_pylist(chosen)
    import_optional("pyarrow.parquet").write_table(table, folder / DATA)


def with_margin(images: Images) -> Images:
    """Images in the middle of `SIZE` x `SIZE` pixels."""
    height, width = images.shape[1:3]
    top, left = (SIZE - height) // 2, (SIZE - width) // 2
    margins = [(0, 0), (top, SIZE - height - top), (left, SIZE - width - left)]
    return np.pad(images, [*margins, *[(0, 0)] * (images.ndim - 3)])


def read_idx(content: bytes) -> Images:
    """An array as MNIST stores it: sizes as big-endian numbers, then bytes; also gzipped."""
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    if content[:3] != b"\x00\x00\x08":
        raise DataError("expected an array of bytes in the IDX format, found something else")
    num_sizes = content[3]
    shape = np.frombuffer(content, ">u4", num_sizes, offset=4).tolist()
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_sizes).reshape(shape)


def _png(image: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    import_optional("PIL.Image").fromarray(with_margin(image[None])[0]).save(file, "PNG")
    return file.getvalue()
