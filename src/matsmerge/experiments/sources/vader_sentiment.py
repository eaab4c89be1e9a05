"""Sentiment tasks from vaderSentiment: texts that 20 people rated from -4 to 4.

Hutto & Gilbert, VADER: A parsimonious rule-based model for sentiment analysis of social media text,
ICWSM 2014. Positive or negative by the mean rating; the undecided ones are left out.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matsmerge.experiments.archives import read_member, refuse_damage
from matsmerge.experiments.packages import fetch
from matsmerge.experiments.sources.texts import write_texts

_UNDECIDED = 0.5  # mean ratings nearer to 0


def movies(folder: Path, settings: Mapping[str, Any]) -> None:
    """Sentences of reviews of films."""
    write_texts(folder, settings, _rated("movieReviewSnippets"))


def amazon(folder: Path, settings: Mapping[str, Any]) -> None:
    """Sentences of reviews of products."""
    write_texts(folder, settings, _rated("amazonReviewSnippets"))


def tweets(folder: Path, settings: Mapping[str, Any]) -> None:
    """Tweets of all kinds."""
    write_texts(folder, settings, _rated("tweets"))


def nyt(folder: Path, settings: Mapping[str, Any]) -> None:
    """Sentences of a newspaper's opinion pieces."""
    write_texts(folder, settings, _rated("nytEditorialSnippets"))


def _rated(name: str) -> Iterator[tuple[str, str]]:
    inner = read_member(fetch("vaderSentiment"), "*/hutto_ICWSM_2014.tar.gz")
    content = read_member(inner, f"*/{name}_GroundTruth.txt").decode("utf-8", "replace")
    for line in content.splitlines():
        with refuse_damage(f"the texts {name}"):
            _, rating, text = line.split("\t", 2)
            value = float(rating)
        if abs(value) >= _UNDECIDED:
            yield text, "positive" if value > 0 else "negative"
