"""Random matrices in float64, each from a generator of its own."""

import numpy as np
import torch
from torch import Tensor


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def spread(generator: torch.Generator, d: int, condition: float) -> Tensor:
    """A symmetric matrix with eigenvalues from 1 down to 1 / condition."""
    q = torch.linalg.qr(normal(generator, d, d)).Q
    values = torch.logspace(0, -float(np.log10(condition)), d, dtype=torch.float64)
    matrix: Tensor = (q * values) @ q.T
    return (matrix + matrix.T) / 2
