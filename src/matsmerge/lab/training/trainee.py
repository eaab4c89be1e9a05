"""What is trained: a model, the tasks it does, and their examples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from matsmerge.errors import NonFiniteError
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.batch_order import make_batches
from matsmerge.tasks.prediction import Reduction
from matsmerge.tasks.task import Encoded, Task

_MAX_TOKENS = 1 << 14  # at once, when the model is scored


@dataclass(frozen=True)
class TaskExamples:
    """A task as one model does it, with its examples."""

    name: str
    task: Task[Any]
    model: nn.Module  # with the head of this task
    train: Sequence[Encoded]
    validation: Sequence[Encoded]

    @torch.no_grad()
    def score(self, batch_size: int, reduction: Reduction) -> float:
        """The mean over examples or words of the kind's `validation_values`; higher is better."""
        device = next(self.model.parameters()).device
        total, count = 0.0, 0
        was_training = self.model.training
        self.model.eval()
        try:
            lengths = [example.length for example in self.validation]
            for chosen in make_batches(lengths, batch_size, _MAX_TOKENS):
                batch = self.task.collate([self.validation[i] for i in chosen]).to(device)
                said = self.task.predict(self.model, batch)
                if not bool(said.losses(reduction).isfinite().all()):
                    raise NonFiniteError(
                        "the validation loss is not finite; the model has diverged, try a smaller "
                        "--lr"
                    )
                values = self.task.validation_values(said, reduction)
                total += float(values.sum())
                count += values.numel()
        finally:
            self.model.train(was_training)
        return total / count


@dataclass(frozen=True)
class TrainingExample:
    """An example to train on, and the number of its task."""

    task: int
    example: Encoded


@dataclass(frozen=True)
class TrainingBatch:
    """Examples drawn together: a batch for each head that they need."""

    parts: list[tuple[int, Batch]]  # with the number of the task whose model and head it takes
    shown: list[TrainingExample]  # in the order of the parts' examples

    def to(self, device: Any) -> "TrainingBatch":
        return replace(self, parts=[(task, batch.to(device)) for task, batch in self.parts])


class Trainee:
    """Examples of all tasks, and their loss.

    Tasks that one model answers with text share batches; classes have a head per task, and a
    batch of their own.
    """

    def __init__(self, model: nn.Module, tasks: Sequence[TaskExamples]) -> None:
        self.model = model
        self.tasks = tasks
        self._trained = [t.task.trained_as for t in tasks]
        kinds = {kind.kind for kind in self._trained}
        self._together = len(kinds) == 1 and all(t.model is tasks[0].model for t in tasks)
        self.shown = [
            TrainingExample(i, t.task.trained_example(e))
            for i, t in enumerate(tasks)
            for e in t.train
        ]

    def collate(self, shown: Sequence[TrainingExample]) -> dict[str, TrainingBatch]:
        """A batch of examples, under one key because Trainer expects a mapping."""
        groups: dict[int, list[TrainingExample]] = {}
        for one in shown:
            groups.setdefault(0 if self._together else one.task, []).append(one)
        ordered = sorted(groups.items())
        parts = [
            (task, self._trained[task].collate([one.example for one in group]))
            for task, group in ordered
        ]
        return {"batch": TrainingBatch(parts, [one for _, group in ordered for one in group])}

    def losses(self, batch: TrainingBatch, reduction: Reduction) -> Tensor:
        """Negative log-likelihoods of the examples, in the order of the parts."""
        return torch.cat(
            [
                self._trained[task].predict(self.tasks[task].model, part).losses(reduction)
                for task, part in batch.parts
            ]
        )
