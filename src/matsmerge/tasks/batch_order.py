"""Which examples are shown to the model together."""

import random
from collections.abc import Sequence

from matsmerge.errors import DataError


def make_batches(lengths: Sequence[int], batch_size: int, max_tokens: int) -> list[list[int]]:
    """Indices of examples of similar length, at most `batch_size` and `max_tokens` with padding.

    An example that is longer than `max_tokens` is a batch of its own. The batch with the longest
    example and the one with the most tokens come first, so that running out of memory shows at
    once; the others follow in an order that is random, so that progress is even, but always the
    same.
    """
    if batch_size < 1 or max_tokens < 1:
        raise DataError(
            "expected a batch size and a number of tokens of at least 1, "
            f"found {batch_size} and {max_tokens}"
        )
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        batch = batches[-1] if batches else []
        # The first of a batch is its longest.
        fits = batch and (len(batch) + 1) * lengths[batch[0]] <= max_tokens
        if fits and len(batch) < batch_size:
            batch.append(index)
        else:
            batches.append([index])
    if not batches:
        return []
    largest = max(batches, key=lambda batch: len(batch) * lengths[batch[0]])
    longest, *others = batches
    random.Random(0).shuffle(others)
    others.sort(key=lambda batch: batch is not largest)
    return [longest, *others]
