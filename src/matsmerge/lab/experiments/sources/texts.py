"""Labelled texts as data of a task."""

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

DATA = "data.jsonl"
MAX_CHARACTERS = 600  # far more than models of this size are given


def write_texts(
    read: Callable[[], Iterable[tuple[str, str]]],
    folder: Path,
    *,
    num_rows: int | None = None,
    max_characters: int = MAX_CHARACTERS,
) -> None:
    """Texts and labels as `data.jsonl`, at most so many, in a random order always the same.

    Each text is there once, as it is after cutting, so that no split can hold a text of another;
    one with different labels is left out.
    """
    labels = defaultdict(set)
    for text, label in read():
        labels[" ".join(text.split())[:max_characters].strip()].add(label)
    chosen = [(text, *found) for text, found in labels.items() if text and len(found) == 1]
    random.Random(0).shuffle(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / DATA).open("w", encoding="utf-8") as file:
        for text, label in chosen[:num_rows]:
            file.write(json.dumps({"text": text, "label": label}) + "\n")
