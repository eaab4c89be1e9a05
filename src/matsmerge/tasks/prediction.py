"""What a model says of a batch: a distribution over answers for each example.

An example's answer is one of a few classes, or a sequence of tokens whose log-probabilities add
up. From it come the losses (negative log-likelihoods) and the terms of the Fisher information
matrix

    F = 1/N sum_n E_y [ grad log p(y | x_n) grad log p(y | x_n)^T ]

with y the given answer (empirical Fisher) or distributed as the model says (true Fisher).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from matsmerge.errors import DataError

IGNORED = -100  # a target that is none, as everywhere in torch and transformers
_NEVER = -1e4  # the logarithm of a probability whose root is zero

Expectation = Literal["empirical", "true"]
Reduction = Literal["sum", "mean"]
_Draw = tuple[int, int, int]  # of signs: the example's number, the seed, which sample


@dataclass(frozen=True)
class Prediction:
    """Logits and targets of a batch.

    Classes: logits (examples, classes), -inf where an example has no such class; targets
    (examples,). Tokens: logits (examples, length, classes), targets (examples, length), `IGNORED`
    where nothing is to be predicted. Targets are already shifted: `targets[:, t]` is what
    `logits[:, t]` predict.
    """

    logits: Tensor
    targets: Tensor | None

    def losses(self, reduction: Reduction = "sum") -> Tensor:  # (examples,)
        """Negative log-likelihood of each example's targets, summed or averaged over tokens."""
        if self.targets is None:
            raise DataError("the data has no targets, which losses and the empirical Fisher need")
        return self._losses_of(self.targets, reduction)

    def fisher_terms(
        self,
        expectation: Expectation,
        reduction: Reduction,
        examples: Sequence[int],
        seed: int = 0,
        num_samples: int = 1,
    ) -> Iterator[Tensor]:  # (examples,) each
        """Per-example scalars whose gradients' outer products sum to each example's Fisher.

        The true Fisher of `num_samples` + 1 classes or fewer is exact. That of more, and of tokens,
        is estimated: by all answers at once, with random signs, `num_samples` times.
        """
        if expectation == "empirical":
            yield self.losses(reduction)
            return
        choices = self._choices() if self.logits.ndim == 2 else None
        if choices is not None and choices.shape[1] <= num_samples:
            yield from choices.unbind(1)
            return
        for sample in range(num_samples):
            draws = [(number, seed, sample) for number in examples]
            if choices is None:
                terms = self._signed_scores(draws, reduction)
            else:
                terms = torch.stack([c @ _signs(c, d) for c, d in zip(choices, draws, strict=True)])
            yield terms / num_samples**0.5

    def _choices(self) -> Tensor:  # (examples, classes - 1)
        """Terms of the choices between two that a choice of a class is made of.

        First whether it is the likeliest class or any other, then whether it is the second, and so
        on. Choice k is reached with probability r and is then made with probability q; its
        information is r q (1 - q) times the outer product of the gradient of log q / (1 - q). All
        of them add up to that of the class, and of a confident model the first is nearly all.
        """
        logits = self.logits
        if logits.shape[1] == 1:  # there is nothing to choose, but a term is expected
            logits = pad(logits, (0, 1), value=-math.inf)
        # Classes that an example does not have count nothing then, and gradients are numbers.
        log_p = log_softmax(logits).clamp(min=_NEVER).sort(1, descending=True).values
        log_rest = log_p.flip(1).logcumsumexp(1).flip(1)  # of each class and all less likely ones
        chosen, others, reached = log_p[:, :-1], log_rest[:, 1:], log_rest[:, :-1]
        return ((chosen + others - reached) / 2).detach().exp() * (chosen - others)

    def _losses_of(self, targets: Tensor, reduction: Reduction) -> Tensor:
        if self.logits.ndim == 2:
            return -log_softmax(self.logits).gather(1, targets[:, None])[:, 0]
        real = targets != IGNORED
        log_p = log_softmax(self.logits[real]).gather(1, targets[real][:, None])[:, 0]
        losses = log_p.new_zeros(len(targets)).index_add(0, real.nonzero()[:, 0], -log_p)
        return losses / real.sum(1) if reduction == "mean" else losses

    def _signed_scores(self, draws: Sequence[_Draw], reduction: Reduction) -> Tensor:
        """Scores of all answers, with roots of their probabilities and random signs, added up.

        Signs are apart, so that products of different answers, and of different tokens, vanish in
        the mean, and what is left is the sum over answers. A single answer drawn by its probability
        has the same mean, but of a confident model nearly every draw says nothing.
        """
        if self.targets is None:
            raise DataError("the data has no targets; they say which tokens are predicted")
        results = []
        for logits, targets, draw in zip(self.logits, self.targets, draws, strict=True):
            log_p = log_softmax(logits[targets != IGNORED])
            present = log_p.isfinite()
            signed = _signs(log_p, draw).mul_(log_p.detach().exp().sqrt())
            score = -(signed * log_p.where(present, 0)).sum()
            results.append(score / len(log_p) if reduction == "mean" else score)
        return torch.stack(results)


def _signs(like: Tensor, draw: _Draw) -> Tensor:
    """Random signs that depend on the draw alone, not on the batch."""
    number, seed, sample = draw
    own_seed = ((seed * 1_000_003 + number) * 1_000_003 + sample) % 2**63
    generator = torch.Generator().manual_seed(own_seed)
    bits = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)
    return bits.to(like).mul_(2).sub_(1)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities in at least float32."""
    at_least = torch.promote_types(logits.dtype, torch.float32)
    return logits.log_softmax(-1, dtype=at_least)
