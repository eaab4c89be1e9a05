"""A short name for what a checkpoint holds, the same however it is stored.

Hashing every byte would take longer than a merge. Fine-tuning moves nearly every weight, so
names, dtypes, shapes and a few stretches of each tensor tell models apart; the result says
"this is the same checkpoint", not "nobody tampered with it".
"""

import hashlib

import torch

from matsmerge.checkpoints.checkpoint import Checkpoint, dtype_name

_NUM_STRETCHES = 4
_STRETCH_ELEMENTS = 256


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 over names, dtypes, shapes and four stretches of 256 elements of every tensor."""
    checkpoint = checkpoint.origin
    digest = hashlib.sha256()
    places = {name: _places(spec.num_elements) for name, spec in sorted(checkpoint.specs.items())}
    stretches = [(name, *place) for name, found in places.items() for place in found]
    values = iter(checkpoint.read_stretches(stretches))
    for name, found in places.items():
        spec = checkpoint.specs[name]
        digest.update(f"{name}\0{dtype_name(spec.dtype)}\0{spec.shape}\0".encode())
        for _ in found:
            digest.update(next(values).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _places(num_elements: int) -> list[tuple[int, int]]:
    """Where stretches of a tensor begin and end."""
    if not num_elements:
        return []
    last = max(0, num_elements - _STRETCH_ELEMENTS)
    starts = sorted({last * i // (_NUM_STRETCHES - 1) for i in range(_NUM_STRETCHES)})
    return [(start, min(start + _STRETCH_ELEMENTS, num_elements)) for start in starts]
