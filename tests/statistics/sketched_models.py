"""A model with second moments that are sketches at a low rank, and others that are not."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import matsmerge
from matsmerge.statistics.statistics import Statistics

RANK = 14
Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    """Wide and narrow layers, with and without biases, two that share an input, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 40)
        self.first = nn.Linear(40, 64)
        self.second = nn.Linear(40, 64, bias=False)
        self.conv = nn.Conv2d(4, 6, 3, groups=2)
        self.narrow = nn.Linear(64, 12, bias=False)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.tokens(x).mean(1) + 0.5
        z = torch.tanh(self.first(z)) * self.second(z)
        images = self.conv(z.view(-1, 4, 4, 4)).mean((2, 3))
        found: Tensor = self.head(torch.tanh(self.narrow(z)) + images.repeat(1, 2))
        return found


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def make_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(50, (15, 3), generator=generator),
            torch.randint(3, (15,), generator=generator),
        )
        for _ in range(6)
    ]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def collect(model: nn.Module, batches: Any, rank: Any = RANK, **options: Any) -> Statistics:
    given: dict[str, Any] = {"statistics": "kfac", "loss": loss} | options
    return matsmerge.collect(model, batches, rank=rank, **given)
