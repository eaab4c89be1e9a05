"""Random numbers that depend on the place they are for, not on who draws them."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from matsmerge.methods.site import Site, SiteTask

_CHUNK_ELEMENTS = 1 << 16  # entries that share one random stream; divides BLOCK_ELEMENTS
LEVELS = 1 << 16  # probabilities are honoured in steps of 1 / 65536


def draw(seed: int, site: Site, task: SiteTask) -> NDArray[np.uint16]:
    """Uniform numbers below `LEVELS` for a model's entries at a site."""
    draws = []
    for start in range(site.start // _CHUNK_ELEMENTS * _CHUNK_ELEMENTS, site.stop, _CHUNK_ELEMENTS):
        key = f"{seed}\0{task.model}\0{site.parameter}\0{start // _CHUNK_ELEMENTS}"
        number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest())
        words = np.random.SFC64(number).random_raw(_CHUNK_ELEMENTS // 4)
        draws.append(words.astype("<u8", copy=False).view(np.uint16))
    skipped = site.start % _CHUNK_ELEMENTS
    return np.concatenate(draws)[skipped : skipped + site.stop - site.start]
