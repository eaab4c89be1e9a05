"""How good is the model so far? One number, of which more is better."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from matsmerge.errors import NonFiniteError
from matsmerge.tasks.batching import make_batches
from matsmerge.tasks.prediction import IGNORED, Reduction
from matsmerge.tasks.task import Encoded, Task

_TEXT_KINDS = ("seq2seq", "causal_lm")


def measure_of(kind: str) -> str:
    """What `score` is for a kind of task."""
    return "negative loss" if kind in _TEXT_KINDS else "accuracy"


@torch.no_grad()
def score(
    task: Task[Any],
    model: nn.Module,
    examples: Sequence[Encoded],
    *,
    batch_size: int,
    reduction: Reduction = "mean",
    max_tokens: int = 1 << 14,
) -> float:
    """Accuracy over examples (over words, where each has a class); of text the negative loss."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    was_training = model.training
    model.eval()
    try:
        for chosen in make_batches([e.length for e in examples], batch_size, max_tokens):
            batch = task.collate([examples[i] for i in chosen]).to(device)
            said = task.predict(model, batch)
            if task.kind in _TEXT_KINDS:
                losses = said.losses(reduction)
                values = -losses.double()
            else:
                assert said.targets is not None
                real = said.targets != IGNORED
                best = said.logits.argmax(-1)
                values = (best == said.targets)[real].double()
                losses = said.losses("mean")
            if not bool(losses.isfinite().all()):
                raise NonFiniteError(
                    "the validation loss is not finite; the model has diverged, try a smaller --lr"
                )
            total += float(values.sum())
            count += values.numel()
    finally:
        model.train(was_training)
    return total / count
