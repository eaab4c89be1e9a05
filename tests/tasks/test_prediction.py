"""Losses and Fisher terms against dense, independent computations."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from matsmerge.errors import DataError
from matsmerge.tasks.prediction import IGNORED, Prediction

INF = float("inf")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fisher(terms: list[Tensor], logits: Tensor) -> Tensor:
    """Per example, the sum of outer products of the terms' gradients: (examples, size, size)."""
    total = torch.zeros(())
    for term in terms:
        (g,) = torch.autograd.grad(term.sum(), logits, retain_graph=True)
        g = g.flatten(1)
        total = total + g[:, :, None] * g[:, None, :]
    return total


def test_losses_of_classes() -> None:
    logits, targets = randn(5, 4), torch.tensor([0, 3, 1, 2, 2])
    expected = cross_entropy(logits, targets, reduction="none")
    for reduction in ("sum", "mean"):
        torch.testing.assert_close(Prediction(logits, targets).losses(reduction), expected)


def test_losses_of_tokens() -> None:
    logits = randn(2, 3, 4)
    targets = torch.tensor([[1, IGNORED, 2], [IGNORED, IGNORED, 0]])
    each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(Prediction(logits, targets).losses("sum"), each.sum(1))
    mean = each.sum(1) / torch.tensor([2, 1])
    torch.testing.assert_close(Prediction(logits, targets).losses("mean"), mean)


def test_losses_need_targets() -> None:
    with pytest.raises(DataError, match="no targets"):
        Prediction(randn(2, 3), None).losses()
    with pytest.raises(DataError, match="which tokens"):
        list(Prediction(randn(2, 3, 4), None).fisher_terms("true", "sum", [0, 1]))


def test_half_precision_is_summed_in_single() -> None:
    logits = randn(3, 4).bfloat16()
    losses = Prediction(logits, torch.tensor([0, 1, 2])).losses()
    assert losses.dtype == torch.float32
    torch.testing.assert_close(
        losses, cross_entropy(logits.float(), torch.tensor([0, 1, 2]), reduction="none")
    )


def dense_true_fisher(logits: Tensor) -> Tensor:
    """sum_y p(y) grad log p(y) grad log p(y)^T, by a loop over examples and classes."""
    result = torch.zeros(len(logits), logits.shape[1], logits.shape[1], dtype=torch.float64)
    for n, row in enumerate(logits.detach()):
        for y in range(len(row)):
            if row[y] == -INF:
                continue
            leaf = row.clone().requires_grad_()
            real = leaf[row != -INF]
            log_p = leaf[y] - real.logsumexp(0)
            (g,) = torch.autograd.grad(log_p, leaf)
            result[n] += log_p.detach().exp() * torch.outer(g, g)
    return result


@pytest.mark.parametrize("choices_differ", [False, True])
@pytest.mark.parametrize("num_samples", [4, 9])
def test_true_fisher_of_few_classes_is_exact(choices_differ: bool, num_samples: int) -> None:
    logits = 3 * randn(4, 5)
    if choices_differ:
        logits[1, 2] = -INF
        logits[2, 1:] = -INF
    logits.requires_grad_()
    prediction = Prediction(logits, None)
    terms = list(prediction.fisher_terms("true", "sum", range(4), num_samples=num_samples))
    assert len(terms) == 4
    torch.testing.assert_close(fisher(terms, logits), dense_true_fisher(logits))


@pytest.mark.parametrize("num_classes", [1, 2])
def test_true_fisher_of_two_classes_takes_one_term(num_classes: int) -> None:
    logits = randn(4, num_classes).requires_grad_()
    terms = list(Prediction(logits, None).fisher_terms("true", "sum", range(4)))
    assert len(terms) == 1
    torch.testing.assert_close(fisher(terms, logits), dense_true_fisher(logits))


def test_empirical_fisher_is_that_of_the_losses() -> None:
    logits = randn(3, 4).requires_grad_()
    targets = torch.tensor([0, 1, 3])
    (term,) = Prediction(logits, targets).fisher_terms("empirical", "sum", range(3))
    torch.testing.assert_close(term, cross_entropy(logits, targets, reduction="none"))


def test_estimated_fisher_of_many_classes_is_unbiased() -> None:
    logits = (2 * randn(1, 30)).requires_grad_()
    prediction = Prediction(logits, None)
    draws = [prediction.fisher_terms("true", "sum", [7], s, num_samples=20) for s in range(200)]
    terms = [term / 200**0.5 for draw in draws for term in draw]
    exact = dense_true_fisher(logits)
    assert (fisher(terms, logits) - exact).norm() < 0.05 * exact.norm()


def test_estimated_fisher_of_tokens_is_unbiased() -> None:
    logits = randn(1, 2, 3).requires_grad_()
    targets = torch.tensor([[0, 2]])
    terms = list(Prediction(logits, targets).fisher_terms("true", "sum", [0], num_samples=4000))
    # Signs of tokens are drawn apart, so blocks off the diagonal vanish.
    blocks = dense_true_fisher(logits[0])
    exact = torch.block_diag(*blocks)[None]
    assert (fisher(terms, logits) - exact).norm() < 0.1 * exact.norm()


def test_one_draw_an_example_is_enough_for_a_confident_model() -> None:
    """Of answers drawn by their probability, about two of these 200 would say anything."""
    logits = torch.zeros(200, 40, dtype=torch.float64)
    logits[:, 0] = 8.3
    logits.requires_grad_()
    terms = list(Prediction(logits, None).fisher_terms("true", "sum", range(200)))
    exact = dense_true_fisher(logits[:1])[0]
    assert (fisher(terms, logits).mean(0) - exact).norm() < 0.2 * exact.norm()


def test_signs_do_not_depend_on_the_batch() -> None:
    logits = randn(4, 5, 40)
    targets = torch.zeros(4, 5, dtype=torch.long)
    targets[2, 3:] = IGNORED
    whole = list(
        Prediction(logits, targets).fisher_terms("true", "sum", [10, 11, 12, 13], num_samples=2)
    )
    # Another order, other neighbours, other padding.
    padded = torch.cat([logits, randn(4, 1, 40, seed=1)], 1)[[2, 0]]
    padded_targets = torch.cat([targets, torch.full((4, 1), IGNORED)], 1)[[2, 0]]
    part = list(
        Prediction(padded, padded_targets).fisher_terms("true", "sum", [12, 10], num_samples=2)
    )
    for a, b in zip(whole, part, strict=True):
        torch.testing.assert_close(a[[2, 0]], b)
    again = list(Prediction(logits, targets).fisher_terms("true", "sum", [10, 11, 12, 13], seed=1))
    assert not torch.allclose(again[0], whole[0] * 2**0.5)


def test_choices_that_are_not_there_have_no_probability() -> None:
    logits = torch.tensor([[0.3, -0.2, -INF], [0.1, 0.5, 0.2]], requires_grad=True)
    prediction = Prediction(logits, torch.tensor([1, 2]))
    losses = prediction.losses()
    torch.testing.assert_close(losses[0], cross_entropy(logits[0, :2], torch.tensor(1)))
    (g,) = torch.autograd.grad(losses.sum(), logits)
    assert g.isfinite().all()
    for term in prediction.fisher_terms("true", "sum", [0, 1]):
        (g,) = torch.autograd.grad(term.sum(), logits, retain_graph=True)
        assert g.isfinite().all()
