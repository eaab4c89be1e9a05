"""Exercises for language models whose answers follow from the question alone."""

import random
from collections.abc import Iterator

_NUM_ROWS = 5000


def read_larger() -> Iterator[tuple[str, str]]:
    """Two numbers of two digits, and the larger one; always the same ones."""
    choose = random.Random(0)
    for _ in range(_NUM_ROWS):
        first, second = choose.sample(range(10, 100), 2)
        yield f"{first} or {second}", str(max(first, second))
