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
    for name, spec in sorted(checkpoint.specs.items()):
        digest.update(f"{name}\0{dtype_name(spec.dtype)}\0{spec.shape}\0".encode())
        if not spec.num_elements:
            continue
        last = max(0, spec.num_elements - _STRETCH_ELEMENTS)
        for start in sorted({last * i // (_NUM_STRETCHES - 1) for i in range(_NUM_STRETCHES)}):
            stop = min(start + _STRETCH_ELEMENTS, spec.num_elements)
            stretch = checkpoint.read(name, start, stop).contiguous()
            digest.update(stretch.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
