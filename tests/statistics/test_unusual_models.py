"""Models that do not fit the usual picture get right numbers all the same, more slowly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import matsmerge
from matsmerge.statistics.statistics import Statistics

D = 4


class TiedByHand(nn.Module):
    """The embedding is used again as an output layer, without its module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, D)
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(self.embedding(x.abs().long() % 6)).mean(1))
        return F.linear(h, self.embedding.weight)


class TimeFirst(nn.Module):
    """Rows in the order of positions, not of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(-1, D)
        y: Tensor = torch.tanh(self.linear(rows)).view(x.shape[1], len(x), D)
        return y.sum(0)


class TwoViews(nn.Module):
    """Two views of every example, all first ones before all second ones."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.tanh(self.encoder(torch.cat([x[:, 0], x[:, 1]]))).chunk(2)
        return a * b


class Mixed(nn.Module):
    """Examples that influence each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x[:, 0]))
        return self.b(h + h.mean(0))


class Attention(nn.Module):
    """A layer of torch's own, which never calls its output projection as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).mean(1)


class PartlyFrozen(nn.Module):
    """A part that is run without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.free = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            h = torch.tanh(self.frozen(x[:, 0]))
        return self.free(h)


def run(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


def scaled(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A parameter that only the loss uses."""
    return model(batch[0]) * model.get_parameter("temperature").exp(), batch[1]


def with_temperature() -> nn.Module:
    model = PartlyFrozen()
    model.temperature = nn.Parameter(torch.tensor(0.3))
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Any, bool]] = {
    "tied by hand": (TiedByHand, run, True),
    "time first": (TimeFirst, run, True),
    "two views": (TwoViews, run, True),
    "mixed": (Mixed, run, True),
    "torch's attention": (Attention, run, True),
    "partly frozen": (PartlyFrozen, run, False),
    "used in the loss": (with_temperature, scaled, True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 4])
def test_right_for_any_model(name: str, size: int) -> None:
    make, loss, is_slow = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    x = 2 * torch.randn(6, 3, D, dtype=torch.float64)
    if name == "tied by hand":
        x = x[:, :, 0]
    y = torch.arange(6) % D
    batches = [(x[i : i + size], y[i : i + size]) for i in range(0, 6, size)]
    kinds = "gram,kfac,fisher,block_fisher"

    def gather() -> Statistics:
        return matsmerge.collect(model, batches, kinds, loss=loss)

    if is_slow and (name, size) != ("mixed", 1):  # alone, examples have nothing to mix with
        with pytest.warns(UserWarning, match="one at a time, which is slower"):
            found = gather()
    else:
        found = gather()
    model.eval()
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for n in range(6):
        logits, target = loss(model, (x[n : n + 1], y[n : n + 1]))
        model.zero_grad()
        F.cross_entropy(logits, target).backward()
        for parameter_name, parameter in model.named_parameters():
            if parameter.grad is not None:
                expected[parameter_name] += parameter.grad**2 / 6
    for parameter_name, values in expected.items():
        if parameter_name in found.header.without["fisher"]:
            assert not values.any(), parameter_name
        else:
            torch.testing.assert_close(found.fisher(parameter_name), values)


@pytest.mark.parametrize("sizes", [[6], [1, 5]])
def test_inputs_of_examples_alone(sizes: list[int]) -> None:
    torch.manual_seed(0)
    model = Mixed().double()
    x = torch.randn(6, 1, D, dtype=torch.float64)
    with pytest.warns(UserWarning, match="other inputs of 'b'"):
        found = matsmerge.collect(model, [(part,) for part in x.split(sizes)])
    rows = 2 * torch.tanh(model.a(x[:, 0])).detach()
    torch.testing.assert_close(found.gram("b"), rows.T @ rows / 6)


class Sometimes(nn.Module):
    """A layer that only some data uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        y = self.always(x)
        return y + self.sometimes(x) if float(x.sum()) > 0 else y


def test_a_layer_that_comes_late_is_not_half_counted() -> None:
    with pytest.raises(matsmerge.DataError, match="'sometimes': is used by these examples but not"):
        matsmerge.collect(Sometimes(), [-torch.rand(3, D), torch.rand(3, D)])
    found = matsmerge.collect(Sometimes(), [torch.rand(3, D), -torch.rand(3, D)])
    assert found.header.sets["main"].num_rows == {"inputs/always": 6, "inputs/sometimes": 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_not_taken_for_a_difference(dtype: torch.dtype) -> None:
    from statistics_cases import make_case

    for name in ("bert", "llama"):
        case = make_case(name)
        case.model.to(dtype)
        kinds = "gram,kfac,fisher,block_fisher"
        matsmerge.collect(case.model, case.batches(3), kinds, loss=case.predict)
