"""Which modules of a block may give back what they gave, and when."""

import torch
from torch import Tensor, nn

from matsmerge.statistics.finished_modules import FinishedModules, find_finished, watch_calls


class InPlace(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x.mul_(2))
        return output


class Turned(nn.Module):
    """Gives tokens first, and sequences second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x).transpose(0, 1).contiguous()
        return output


class Attention(nn.Module):
    """A module with two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.norm(self.second(self.first(x))), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.in_place, self.turned = Attention(), InPlace(), Turned()
        self.twice, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)[0]
        x = self.in_place(x.clone())
        x = self.turned(x).transpose(0, 1)
        output: Tensor = self.last(self.twice(self.twice(x)))
        return output


def find(num_tokens: int) -> FinishedModules:
    model = nn.ModuleDict({"block": Block()})
    block = model["block"]
    passes = [
        (watch_calls(model, lambda n=n: block(torch.randn(n, num_tokens, 4))), n)  # type: ignore[misc]
        for n in (3, 1)
    ]
    return find_finished(model, passes)


def test_modules_are_held_once_nothing_in_them_will_change() -> None:
    found = find(num_tokens=5)
    last = "block.last"
    assert found.outermost("block", (), last) == [
        "block.attention", "block.in_place.linear", "block.turned.linear",
    ]  # fmt: skip
    assert found.outermost("block", ["block.attention.second.bias"], last)[0] == (
        "block.attention.first"
    )
    assert found.outermost("block", ["block.attention.norm.weight"], last)[:2] == [
        "block.attention.first", "block.attention.second",
    ]  # fmt: skip


def test_modules_are_held_if_they_end_before_what_is_looked_at() -> None:
    found = find(num_tokens=5)
    assert found.outermost("block", (), "block.attention.first") == []
    assert found.outermost("block", (), "block.attention.second") == ["block.attention.first"]
    assert "block.last" in found.outermost("block", (), None)
    assert found.outermost("blo", (), None) == []
    assert found.without("block").outermost("block", (), None) == []


def test_as_many_tokens_as_sequences_do_not_mislead() -> None:
    assert "block.turned" not in find(num_tokens=3).tensors
    assert "block.turned" not in find(num_tokens=5).tensors
