"""Several models that write one answer together."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from torch import Tensor, nn

from matsmerge.models.heads import HeadOutput
from matsmerge.tasks.prediction import log_softmax


class EnsembleModel(nn.Module):
    """p(y_t | x, y_<t) = 1/M sum_m p_m(y_t | x, y_<t), for models of one tokenizer.

    Logits are the logarithms of these means.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        first: Any = models[0]
        self.generation_config = first.generation_config

    def forward(self, **inputs: Any) -> HeadOutput:
        return HeadOutput(_log_mean([model(**inputs).logits for model in self.models]))

    def generate(self, **arguments: Any) -> Tensor:
        """Let every model write, each with its own cache, in step with the others."""
        table = _Table(len(self.models))
        with ThreadPoolExecutor(len(self.models)) as pool:
            writing = [
                pool.submit(table.write, number, model, arguments)
                for number, model in enumerate(self.models)
            ]
        errors = [error for one in writing if (error := one.exception()) is not None]
        for error in errors:
            if not isinstance(error, BrokenBarrierError):  # which those get who waited for it
                raise error
        return writing[0].result()


class _Table:
    """Where models that write at the same time put their scores of the next token, and wait."""

    def __init__(self, num_models: int) -> None:
        self._scores: list[Tensor] = [torch.zeros(())] * num_models
        self._all_are_here = Barrier(num_models, self._average)
        self._mean = torch.zeros(())

    def _average(self) -> None:
        self._mean = _log_mean(self._scores)

    def write(self, number: int, model: Any, arguments: dict[str, Any]) -> Tensor:
        """What one of the models writes, which is what all of them do."""

        def agree(_: Tensor, scores: Tensor) -> Tensor:  # (sequences, tokens)
            self._scores[number] = scores
            self._all_are_here.wait()
            # The next mean is made when all have come again, so after all have taken this one.
            return self._mean

        try:
            written: Tensor = model.generate(**arguments, logits_processor=[agree])
        except BaseException:
            self._all_are_here.abort()
            raise
        return written


def _log_mean(logits: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean probability; what a padded vocabulary has beyond others' is cut."""
    width = min(one.shape[-1] for one in logits)
    each = torch.stack([log_softmax(one[..., :width]) for one in logits])
    return each.logsumexp(0) - math.log(len(logits))
