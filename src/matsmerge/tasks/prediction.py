"""What a model says of a batch: a distribution over answers for each example.

An example's answer is one of a few classes, or a sequence of tokens whose log-probabilities add
up. From it come the losses (negative log-likelihoods) and the terms of the Fisher information
matrix

    F = 1/N sum_n E_y [ grad log p(y | x_n) grad log p(y | x_n)^T ]

with y the given answer (empirical Fisher) or distributed as the model says (true Fisher).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from matsmerge.errors import DataError

IGNORED = -100  # a target that is none, as everywhere in torch and transformers
MAX_EXACT_CLASSES = 32  # the true Fisher sums over classes one by one up to here

Expectation = Literal["empirical", "true"]
Reduction = Literal["sum", "mean"]


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

        The true Fisher of many classes, and of tokens, is estimated: by all answers at once, with
        random signs, `num_samples` times.
        """
        if expectation == "empirical":
            yield self.losses(reduction)
        elif self.logits.ndim == 2 and self.logits.shape[1] <= MAX_EXACT_CLASSES:
            log_p = log_softmax(self.logits)
            for of_class in log_p.unbind(1):
                present = of_class.isfinite()
                # The root of p beside the score makes p the weight of its outer product.
                root = of_class.detach().exp().sqrt()
                yield -torch.where(present, root * of_class.where(present, 0), 0)
        else:
            for sample in range(num_samples):
                scores = self._signed_scores(examples, (seed, sample), reduction)
                yield scores / num_samples**0.5

    def _losses_of(self, targets: Tensor, reduction: Reduction) -> Tensor:
        if self.logits.ndim == 2:
            return -log_softmax(self.logits).gather(1, targets[:, None])[:, 0]
        real = targets != IGNORED
        log_p = log_softmax(self.logits[real]).gather(1, targets[real][:, None])[:, 0]
        losses = log_p.new_zeros(len(targets)).index_add(0, real.nonzero()[:, 0], -log_p)
        return losses / real.sum(1) if reduction == "mean" else losses

    def _signed_scores(
        self, examples: Sequence[int], draw: tuple[int, int], reduction: Reduction
    ) -> Tensor:
        """Scores of all answers, with roots of their probabilities and random signs, added up.

        Signs are apart, so that products of different answers, and of different tokens, vanish in
        the mean, and what is left is the sum over answers. A single answer drawn by its probability
        has the same mean, but of a confident model nearly every draw says nothing.
        """
        if self.logits.ndim == 3 and self.targets is None:
            raise DataError("the data has no targets; they say which tokens are predicted")
        results = []
        for n, number in enumerate(examples):
            logits = self.logits[n : n + 1]
            if self.logits.ndim == 3:
                assert self.targets is not None
                logits = logits[0][self.targets[n] != IGNORED]
            log_p = log_softmax(logits)
            present = log_p.isfinite()
            signed = _signs(log_p, number, draw).mul_(log_p.detach().exp().sqrt())
            score = -(signed * log_p.where(present, 0)).sum()
            results.append(score / len(logits) if reduction == "mean" else score)
        return torch.stack(results)


def _signs(like: Tensor, number: int, draw: tuple[int, int]) -> Tensor:
    """Random signs that depend on the example's number and the draw alone, not on the batch."""
    seed, sample = draw
    own_seed = ((seed * 1_000_003 + number) * 1_000_003 + sample) % 2**63
    generator = torch.Generator().manual_seed(own_seed)
    bits = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)
    return bits.to(like).mul_(2).sub_(1)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities in at least float32."""
    at_least = torch.promote_types(logits.dtype, torch.float32)
    return logits.log_softmax(-1, dtype=at_least)
