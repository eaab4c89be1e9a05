"""What is trained: a model, the tasks it does, and their examples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from matsmerge.tasks.batch import Batch
from matsmerge.tasks.prediction import Reduction
from matsmerge.tasks.task import Encoded, Task


@dataclass(frozen=True)
class TaskExamples:
    """A task as one model does it, with its examples."""

    name: str
    task: Task[Any]
    model: nn.Module  # with the head of this task
    train: Sequence[Encoded]
    validation: Sequence[Encoded] = ()


@dataclass(frozen=True)
class Shown:
    """An example to train on, and the number of its task."""

    task: int
    example: Encoded


@dataclass(frozen=True)
class ShownBatch:
    """Examples drawn together: a batch for each head that they need."""

    parts: list[tuple[int, Batch]]  # with the number of the task whose model and head it takes
    shown: list[Shown]  # in the order of the parts' examples

    def to(self, device: Any) -> "ShownBatch":
        return replace(self, parts=[(task, batch.to(device)) for task, batch in self.parts])


class Trainee:
    """Examples of all tasks, and their loss.

    Tasks that one model answers with text share batches; classes have a head per task, and a
    batch of their own.
    """

    def __init__(self, model: nn.Module, tasks: Sequence[TaskExamples]) -> None:
        self.model = model
        self.tasks = list(tasks)
        self._trained = [t.task.trained_as for t in self.tasks]
        first = self.tasks[0].model
        self._together = all(
            t.model is first and kind.kind == self._trained[0].kind
            for t, kind in zip(self.tasks, self._trained, strict=True)
        )
        self.shown = [
            Shown(i, t.task.trained_example(e)) for i, t in enumerate(self.tasks) for e in t.train
        ]

    def collate(self, shown: Sequence[Shown]) -> dict[str, ShownBatch]:
        """Under one key, as Trainer wants it."""
        groups: dict[int, list[Shown]] = {}
        for one in shown:
            groups.setdefault(0 if self._together else one.task, []).append(one)
        parts = [
            (task, self._trained[task].collate([one.example for one in group]))
            for task, group in sorted(groups.items())
        ]
        ordered = [one for _, group in sorted(groups.items()) for one in group]
        return {"batch": ShownBatch(parts, ordered)}

    def losses(self, batch: ShownBatch, reduction: Reduction) -> list[Tensor]:
        """Negative log-likelihoods of the examples of each part."""
        return [
            self._trained[task].predict(self.tasks[task].model, part).losses(reduction)
            for task, part in batch.parts
        ]
