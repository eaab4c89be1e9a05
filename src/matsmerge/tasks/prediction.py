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
MAX_EXACT_CLASSES = 32  # the true Fisher sums over all classes up to here, and samples beyond

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

        Samples depend on the seed and the example's number alone, not on the batch.
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
                targets = self._sample(examples, seed, sample)
                yield self._losses_of(targets, reduction) / num_samples**0.5

    def _losses_of(self, targets: Tensor, reduction: Reduction) -> Tensor:
        if self.logits.ndim == 2:
            return -log_softmax(self.logits).gather(1, targets[:, None])[:, 0]
        real = targets != IGNORED
        log_p = log_softmax(self.logits[real]).gather(1, targets[real][:, None])[:, 0]
        losses = log_p.new_zeros(len(targets)).index_add(0, real.nonzero()[:, 0], -log_p)
        return losses / real.sum(1) if reduction == "mean" else losses

    def _sample(self, examples: Sequence[int], seed: int, sample: int) -> Tensor:
        """Targets drawn from the model's distribution, token by token given the data's prefix."""
        if self.logits.ndim == 3 and self.targets is None:
            raise DataError("the data has no targets; they say which tokens are predicted")
        rows = []
        for n, number in enumerate(examples):
            if self.logits.ndim == 2:
                logits = self.logits[n : n + 1]
            else:
                assert self.targets is not None
                logits = self.logits[n][self.targets[n] != IGNORED]
            cumulative = logits.detach().double().softmax(1).cumsum(1)
            own_seed = ((seed * 1_000_003 + number) * 1_000_003 + sample) % 2**63
            generator = torch.Generator().manual_seed(own_seed)
            u = torch.rand(len(logits), 1, generator=generator, dtype=torch.float64)
            drawn = (cumulative < u.to(logits.device) * cumulative[:, -1:]).sum(1)
            rows.append(drawn)
        if self.logits.ndim == 2:
            return torch.cat(rows)
        assert self.targets is not None
        targets = self.targets.clone()
        targets[targets != IGNORED] = torch.cat(rows).to(targets.dtype)
        return targets


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities in at least float32."""
    at_least = torch.promote_types(logits.dtype, torch.float32)
    return logits.log_softmax(-1, dtype=at_least)
