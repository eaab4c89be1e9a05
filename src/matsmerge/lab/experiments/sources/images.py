"""Labelled images as data of a task."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from matsmerge.optional_import import import_optional

DATA = "data.parquet"
SIZE = 32  # pixels on a side; smaller images get a black margin

Images = npt.NDArray[np.uint8]  # (images, height, width), or with 3 colours at the end
Labelled = tuple[Images, Sequence[str]]


def write_images(
    read: Callable[[], Labelled], folder: Path, *, num_rows: int | None = None
) -> None:
    """Images and labels as `data.parquet`, at most so many, in a random order always the same.

    Each image is there once, so that no split can hold an image of another.
    """
    images, labels = read()
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


def _png(image: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    import_optional("PIL.Image").fromarray(with_margin(image[None])[0]).save(file, "PNG")
    return file.getvalue()
