"""What a model answers on its own data: how sure it is, and whether it tells examples apart."""

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matsmerge.data.rows import Data
from matsmerge.errors import DataError, NonFiniteError
from matsmerge.models.kept_base import KeptBase
from matsmerge.progress import Progress
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.batch_order import make_batches
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.prediction import IGNORED, Prediction
from matsmerge.tasks.task import Encoded, encode_all
from matsmerge.tasks.task_file import TaskFile

_BATCH_SIZE, _MAX_TOKENS = 32, 4096
_PROBABILITIES = 1 << 22  # held at once in float64: a vocabulary has many for each token


@dataclass(frozen=True)
class Answers:
    """A model's answers in numbers; of text, an answer is a token.

    `variety` is how much an answer says about the example, the mutual information of the two, as a
    share of the most that as many classes or examples allow: 0 if all examples get the same answer,
    sure or not, and 1 if the model is always sure and uses all classes alike.
    """

    num_examples: int
    num_classes: int
    confidence: float  # mean probability of the likeliest answer
    variety: float
    commonest_share: float  # of examples that get the commonest answer
    writes_text: bool
    accuracy: float | None = None  # where the data has labels
    majority: float | None = None  # share of the commonest label
    label_variety: float | None = None  # entropy of the labels, of the most possible


@dataclass(frozen=True)
class PreparedModel:
    """A model that was loaded, and examples encoded for it; nothing has been run."""

    loaded: LoadedModel
    examples: Sequence[Encoded]
    notes: tuple[str, ...]


def choose_rows(num_rows: int, num: int) -> list[int]:
    """Rows at random, in order: of a file sorted by label, the first ones have one label."""
    return sorted(random.Random(0).sample(range(num_rows), min(num, num_rows)))


def ask(source: str, described: TaskFile, rows: Data, num: int, kept: KeptBase) -> PreparedModel:
    """Load a model and encode examples; labels are used where there are some that can be read."""
    loaded = load_model(source, described, need_targets=False, kept=kept)
    numbers = choose_rows(len(rows), num)
    task, notes = loaded.task, list(loaded.notes)
    target = task.targets and described.columns.get(task.targets, task.targets)
    if target in rows.columns:
        with_labels = copy.copy(task)
        with_labels.options = replace(task.options, need_targets=True)
        try:
            examples = encode_all(
                with_labels, rows, described.columns, numbers, wordings=described.wordings
            )
            return PreparedModel(replace(loaded, task=with_labels), examples, tuple(notes))
        except DataError as error:
            notes.append(f"the labels were not used: {error.problems[0]}")
    examples = encode_all(task, rows, described.columns, numbers, wordings=described.wordings)
    return PreparedModel(loaded, examples, tuple(notes))


def answer(asked: PreparedModel, progress: Progress) -> Answers:
    """Run the model; every example counts the same, or of text every token."""
    model, task = asked.loaded.model, asked.loaded.task
    model.eval()
    device = next(model.parameters()).device
    tally = _Tally()
    lengths = [example.length for example in asked.examples]
    with torch.no_grad():
        for indices in make_batches(lengths, _BATCH_SIZE, _MAX_TOKENS):
            batch = task.collate([asked.examples[i] for i in indices]).to(device)
            logits, targets = _rows(task.predict(model, batch), batch)
            num = max(1, _PROBABILITIES // logits.shape[1])
            for i in range(0, len(logits), num):
                tally.add(logits[i : i + num], None if targets is None else targets[i : i + num])
            progress.advance(len(indices))
    if not math.isfinite(tally.entropy):
        raise NonFiniteError(
            f"{asked.loaded.checkpoint.label}: its answers on its data are NaN; its weights hold "
            "or lead to NaN or Inf"
        )
    return tally.answers(len(asked.examples), writes_text=task.writes_text)


def _rows(said: Prediction, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Logits (answers, classes), and the right answers where they are known."""
    logits, targets = said.logits, said.targets
    if logits.ndim == 3:
        real = batch.row_masks[0] if targets is None else targets != IGNORED
        logits, targets = logits[real], None if targets is None else targets[real]
    return logits.cpu(), None if targets is None else targets.cpu()


class _Tally:
    """Sums over answers."""

    def __init__(self) -> None:
        self.num = self.right = 0
        self.confidence = self.entropy = 0.0
        self.mean = torch.zeros(0, dtype=torch.float64)  # (classes,), a sum until the end
        self.said = self.labels = torch.zeros(0, dtype=torch.long)  # (classes,)
        self.is_labelled = True

    def add(self, logits: Tensor, targets: Tensor | None) -> None:  # (answers, classes), (answers,)
        p = logits.double().softmax(-1)
        said = p.argmax(-1)
        self.num += len(p)
        self.confidence += float(p.max(-1).values.sum())
        self.entropy += float(_entropy(p).sum())
        self.mean = _added(self.mean, p.sum(0))
        self.said = _added(self.said, said.bincount(minlength=p.shape[1]))
        if targets is None:
            self.is_labelled = False
        else:
            self.right += int((said == targets).sum())
            self.labels = _added(self.labels, targets.bincount(minlength=p.shape[1]))

    def answers(self, num_examples: int, *, writes_text: bool) -> Answers:
        num = max(1, self.num)
        most = math.log(max(2, min(len(self.mean), num)))
        information = float(_entropy(self.mean / num)) - self.entropy / num
        return Answers(
            num_examples,
            len(self.mean),
            self.confidence / num,
            max(0.0, information / most),
            int(self.said.max()) / num,
            writes_text,
            self.right / num if self.is_labelled else None,
            int(self.labels.max()) / num if self.is_labelled else None,
            float(_entropy(self.labels / num)) / most if self.is_labelled else None,
        )


def _entropy(p: Tensor) -> Tensor:  # (..., classes) -> (...)
    logarithms: Tensor = torch.special.xlogy(p, p)
    return -logarithms.sum(-1)


def _added(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two vectors; examples of multiple choice differ in the number of choices."""
    total = torch.zeros(max(len(a), len(b)), dtype=b.dtype)
    total[: len(a)] += a
    total[: len(b)] += b
    return total
