"""K-FAC per example and per token, against factors computed from the data."""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import matsmerge

LENGTHS = (3, 7)  # tokens of each model's examples


class Tagger(nn.Module):
    """Three answers of yes or no for each token, so that no direction is without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, 4)
        logits: Tensor = self.out(x)
        return logits


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return softplus(model(x)).sum((1, 2))


def dense_factors(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over all tokens: of the gradients' second moment, and of the inputs'."""
    logits = model(x).detach().requires_grad_()
    (rows,) = torch.autograd.grad(softplus(logits).sum(), logits)
    o, z = rows.flatten(0, 1), x.flatten(0, 1)
    return o.T @ o, z.T @ z


def test_per_example_and_per_token() -> None:
    torch.manual_seed(0)
    models = [Tagger().double() for _ in LENGTHS]
    data = [torch.randn(20, length, 4, dtype=torch.float64) for length in LENGTHS]
    statistics = [
        matsmerge.collect(model, x.split(6), "kfac", loss=loss)
        for model, x in zip(models, data, strict=True)
    ]
    weights = [model.out.weight.detach() for model in models]
    found = {}
    for per in ("example", "token"):
        a, b = torch.zeros(12, 12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
        for model, x, weight in zip(models, data, weights, strict=True):
            outputs, inputs = dense_factors(model, x)
            num_tokens = x.shape[0] * x.shape[1]
            outputs /= len(x) if per == "example" else num_tokens
            fisher = torch.kron(outputs, inputs / num_tokens)
            a += fisher
            b += fisher @ weight.flatten()
        start = torch.stack(weights).mean(0)
        step = torch.linalg.pinv(a, hermitian=True) @ (b - a @ start.flatten())
        merged = matsmerge.merge(
            models, None, "mats", statistics=statistics, init="average", objective="kfac",
            per=per, solver="closed_form",
        )["out.weight"]  # fmt: skip
        found[per] = merged.double()
        expected = (start.flatten() + step).view(3, 4)
        # Factors are raised by what rounding to float32 may have done to them.
        torch.testing.assert_close(found[per], expected, rtol=0, atol=1e-4)
    difference = (found["example"] - found["token"]).norm() / found["token"].norm()
    assert float(difference) > 0.01


def test_it_makes_no_difference_where_models_are_equalized() -> None:
    torch.manual_seed(0)
    models = [Tagger() for _ in LENGTHS]
    statistics = [
        matsmerge.collect(model, [torch.randn(20, length, 4)], "kfac", loss=loss)
        for model, length in zip(models, LENGTHS, strict=True)
    ]
    one, other = (
        matsmerge.merge(
            models, None, "mats", statistics=statistics, init="average", objective="kfac",
            equalize=True, per=per,
        )["out.weight"]
        for per in ("example", "token")
    )  # fmt: skip
    torch.testing.assert_close(one, other)
