"""Sentiment tasks from vaderSentiment: texts that 20 people rated from -4 to 4.

Hutto & Gilbert, VADER: A parsimonious rule-based model for sentiment analysis of social media text,
ICWSM 2014. Positive or negative by the mean rating; the undecided ones are left out.
"""

from collections.abc import Iterator

from matsmerge.lab.experiments.archives import read_member
from matsmerge.lab.experiments.packages import fetch

_UNDECIDED = 0.5  # mean ratings nearer to 0


def read_rated(name: str) -> Iterator[tuple[str, str]]:
    """Texts of one of the collections, positive or negative."""
    inner = read_member(fetch("vaderSentiment"), "*/hutto_ICWSM_2014.tar.gz")
    content = read_member(inner, f"*/{name}_GroundTruth.txt").decode("utf-8", "replace")
    for line in content.splitlines():
        _, rating, text = line.split("\t", 2)
        if abs(float(rating)) >= _UNDECIDED:
            yield text, "positive" if float(rating) > 0 else "negative"
