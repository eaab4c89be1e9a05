"""Photographs of clothes: Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017), from Debian."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matsmerge.experiments.archives import read_member, refuse_damage
from matsmerge.experiments.packages import fetch
from matsmerge.experiments.sources.images import read_idx, write_images

_FOLDER = "usr/share/datasets/fashion-mnist"
_CLASSES = (
    *("t-shirt", "trousers", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)


def fashion(folder: Path, settings: Mapping[str, Any]) -> None:
    """Which of ten kinds it is."""
    archive = fetch("dataset-fashion-mnist")
    images = read_idx(read_member(archive, f"{_FOLDER}/train-images-idx3-ubyte.gz"))
    labels = read_idx(read_member(archive, f"{_FOLDER}/train-labels-idx1-ubyte.gz"))
    with refuse_damage("labels"):
        names = [_CLASSES[label] for label in labels]
    write_images(folder, settings, images, names)
