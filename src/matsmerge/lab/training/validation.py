"""How good is the model so far? One number, of which more is better."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from matsmerge.errors import NonFiniteError
from matsmerge.tasks.batch_order import make_batches
from matsmerge.tasks.prediction import Reduction
from matsmerge.tasks.task import Encoded, Task


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
    """The mean of what the kind of task measures, over examples or words."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    was_training = model.training
    model.eval()
    try:
        for chosen in make_batches([e.length for e in examples], batch_size, max_tokens):
            batch = task.collate([examples[i] for i in chosen]).to(device)
            said = task.predict(model, batch)
            values = task.validation_values(said, reduction)
            if not bool(said.losses(reduction).isfinite().all()):
                raise NonFiniteError(
                    "the validation loss is not finite; the model has diverged, try a smaller --lr"
                )
            total += float(values.sum())
            count += values.numel()
    finally:
        model.train(was_training)
    return total / count
