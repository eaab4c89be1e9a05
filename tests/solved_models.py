"""A small network in several fine-tuned versions, with statistics of each."""

import copy
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import matsmerge
from matsmerge.statistics.statistics import Statistics

State = dict[str, Tensor]
KINDS = ("gram", "kfac", "fisher", "block_fisher")


class Net(nn.Module):
    """An embedding, a norm, linear layers with and without biases, a convolution of two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.first = nn.Linear(6, 8)
        self.gate = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6, bias=False)
        self.conv = nn.Conv2d(2, 4, (1, 2), groups=2)
        self.out = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, 4)
        x = self.norm(self.embed(tokens))
        x = self.second(torch.tanh(self.first(x)) * self.gate(x))  # (batch, 4, 6)
        x = self.conv(x.view(len(x), 2, 2, 6)[..., ::2])  # (batch, 4, 2, 2)
        return self.out(torch.tanh(x.flatten(1)[:, :12]))  # type: ignore[no-any-return]


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens), tokens.sum(1) % 3, reduction="none")


@cache
def make_nets(num: int = 3) -> tuple[Net, tuple[Net, ...]]:
    """The base, and models that moved away from it."""
    torch.manual_seed(0)
    base = Net()
    models = []
    for _ in range(num):
        model = copy.deepcopy(base)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        models.append(model)
    return base, tuple(models)


def make_batches(seed: int, num: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 11, (10, 4), generator=generator) for _ in range(num)]


@cache
def make_statistics(num: int = 3) -> tuple[Statistics, ...]:
    """Statistics of every kind and a held-out set, for each model on data of its own."""
    return tuple(
        matsmerge.collect(model, make_batches(i), KINDS, loss=loss, held_out=0.25)
        for i, model in enumerate(make_nets(num)[1])
    )


def solve_dense(covariances: Sequence[Tensor], thetas: Sequence[Tensor], start: Tensor) -> Tensor:
    """start + (sum C)⁺ sum C (theta - start), with the covariances written out (n, n)."""
    a = torch.stack([c.double() for c in covariances]).sum(0)
    r = torch.stack(
        [
            c.double() @ (t.double() - start.double()).flatten()
            for c, t in zip(covariances, thetas, strict=True)
        ]
    ).sum(0)
    inverse: Tensor = torch.linalg.pinv(a, hermitian=True, rtol=1e-6)
    return start.double() + (inverse @ r).view_as(start)
