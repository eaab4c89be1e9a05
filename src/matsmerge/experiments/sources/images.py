"""Labelled images as data of a task."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from matsmerge.errors import DataError
from matsmerge.experiments.archives import unzip
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
    if len(images) != len(labels) or images.ndim < 3 or max(images.shape[1:3]) > SIZE:
        raise DataError(
            f"expected images of at most {SIZE} x {SIZE} pixels with a label each, found "
            f"{len(labels)} labels and an array of {' x '.join(map(str, images.shape))}; the "
            "package is damaged. Delete it in the cache, and it is fetched again"
        )
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
        content = unzip(content, "an array in the IDX format")
    if content[:3] != b"\x00\x00\x08":
        raise DataError("expected an array of bytes in the IDX format, found something else")
    num_sizes = content[3] if len(content) > 3 else 0
    begin = 4 + 4 * num_sizes
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, begin, 4)]
    num = len(content) - begin
    if not 1 <= num_sizes <= 4 or math.prod(shape) != num:
        raise DataError(
            f"an array in the IDX format: expected {' x '.join(map(str, shape[:4]))} bytes, "
            f"found {num}; it is damaged. Delete the package in the cache, and it is fetched again"
        )
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


def _png(image: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    import_optional("PIL.Image").fromarray(with_margin(image[None])[0]).save(file, "PNG")
    return file.getvalue()
