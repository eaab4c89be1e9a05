"""One model on one task."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from matsmerge.checkpoints.source import local_path, open_checkpoint
from matsmerge.data.rows import Data, fingerprint_rows
from matsmerge.errors import DataError, NonFiniteError
from matsmerge.lab.evaluation.metrics import METRICS, choose_metrics
from matsmerge.lab.evaluation.outcome import Answer, Outcome
from matsmerge.progress import Progress
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.batch_order import make_batches
from matsmerge.tasks.generation import Generation
from matsmerge.tasks.head_record import HEADS, find_heads
from matsmerge.tasks.kinds import TASKS, TaskKind
from matsmerge.tasks.loaded_model import LoadedModel
from matsmerge.tasks.prediction import IGNORED, Prediction
from matsmerge.tasks.task import Encoded, Task, encode_all
from matsmerge.tasks.task_file import TaskFile
from matsmerge.tasks.text_task import AnswerTask


@dataclass(frozen=True)
class EvaluationSettings:
    """How models are run to be scored."""

    num_examples: int | None = None  # the first so many; None: all
    batch_size: int = 32
    max_tokens: int = 4096
    device: str | None = None
    dtype: str | None = None


def evaluate_task(
    loaded: LoadedModel,
    data: Data,
    task_file: TaskFile,
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> Outcome:
    """Ask a model all examples of a task; the settings are fields of `Settings`.

    Batches are of examples of similar length; answers are in the order of the data, and do not
    depend on how examples are put together but for rounding.
    """
    chosen = EvaluationSettings(**settings)
    examined = encode_task(loaded.task, data, task_file, num_examples=chosen.num_examples)
    return answer_examples(loaded, examined, chosen, progress or Progress())


@dataclass(frozen=True)
class Examined:
    """A task's examples as a model will see them, checked."""

    task_file: TaskFile
    kind: TaskKind
    metrics: list[str]
    examples: Sequence[Encoded]
    data: str  # fingerprint of the rows used
    split: str | None
    notes: list[str]
    tokens: Mapping[str, int] | None = None  # the tokenizer's, where answers are text

    def is_read_like(self, other: "Examined") -> bool:
        """Whether two models have the same tokens, and see the same ones of every example."""
        return self.tokens == other.tokens and self.examples == other.examples


def encode_task(
    task: Task[Any], data: Data, task_file: TaskFile, *, num_examples: int | None = None
) -> Examined:
    """Check and encode a task's examples; all that is wrong with them is one error."""
    name = task_file.title
    kind = TASKS[task.kind]
    metrics = choose_metrics(task_file, kind)
    if num_examples is not None and num_examples < 1:
        raise DataError(f"expected a number of examples of at least 1, found {num_examples}")
    num = len(data) if num_examples is None else min(num_examples, len(data))
    doing = _doing(task, task_file)
    examples = encode_all(doing, data, task_file.columns, range(num), wordings=task_file.wordings)
    unfit = [m for m in metrics if METRICS[m].same_classes]
    if unfit and len({example.num_choices for example in examples}) > 1:
        DataError.raise_all(
            f"{name}: the metric '{metric}' needs choice n to mean the same in every example, "
            "but the examples differ in the number of their choices; use accuracy"
            for metric in unfit
        )
    notes = list(doing.notes)
    if left_out := data.labels_left_out(task_file.columns.get("label", "label"), range(num)):
        notes.append(
            f"the first {num} examples {left_out} splits with sizes (splits:) are in random order"
        )
    rows = [data.rows[number] for number in range(num)]
    return Examined(
        task_file,
        kind,
        metrics,
        examples,
        fingerprint_rows(rows, data.folder),
        data.split,
        [f"{name}: {note}" for note in notes],
        task.encoder.tokenizer.get_vocab() if isinstance(task, AnswerTask) else None,
    )


def answer_examples(
    loaded: LoadedModel, examined: Examined, settings: EvaluationSettings, progress: Progress
) -> Outcome:
    """The model's answers to examples that were encoded for it, or for one like it."""
    model, task_file, examples = loaded.model, examined.task_file, examined.examples
    model.eval()
    doing = _doing(loaded.task, task_file)
    found: list[Answer] = []
    lengths = [example.length for example in examples]
    with torch.no_grad():
        for indices in make_batches(lengths, settings.batch_size, settings.max_tokens):
            chosen = [examples[i] for i in indices]
            if isinstance(doing, Generation):
                answers = _write(model, doing, chosen, "loss" in examined.metrics)
            else:
                answers = _answer(model, doing, chosen)
            for answer in answers:
                if answer.loss is not None and not math.isfinite(answer.loss):
                    raise NonFiniteError(
                        f"{loaded.checkpoint.label}: the loss of row {answer.number + 1} of the "
                        f"task {task_file.title} is {answer.loss}; its weights hold or lead to NaN "
                        "or Inf (a larger --dtype may help)"
                    )
            found += answers
            progress.advance(len(indices))
    found.sort(key=lambda answer: answer.number)
    return Outcome(task_file.title, examined.kind.kind, examined.split, examined.data, found)


def resolve_head(model_folder: str | Path, task_file: TaskFile) -> str | None:
    """The file with the head for a task: the task file's own, or MODEL/heads/TASK.safetensors.

    None for a model that brings its head itself, or needs none.
    """
    if task_file.head is not None:
        return task_file.head
    kind = TASKS.get(str(task_file.task))
    if kind is not None and not kind.has_classes:
        return None
    folder: Path | None = local_path(model_folder)
    if folder is not None and not folder.is_dir():
        folder = open_checkpoint(model_folder).folder
    if folder is None or not (folder / HEADS).is_dir():
        return None
    there = find_heads(folder)
    name = task_file.title
    if name in there:
        return str(there[name])
    if task_file.options().class_prompts:
        return None  # made of the names of classes
    raise DataError(
        f"{model_folder}: has no head for the task '{name}', only for "
        f"{', '.join(there) or 'none'}; call the task by one of these names (name: in the task "
        "file), or give the head's file (head:)"
    )


def _doing(task: Task[Any], task_file: TaskFile) -> Task[Any] | Generation:
    """The task itself, or `Generation` where the task file asks for written answers."""
    if task_file.generate is None:
        return task
    return Generation(task, task_file.generate)  # type: ignore[arg-type]  # checked by metrics


def device_of(model: nn.Module) -> torch.device:
    """The device for inputs; a model that begins on disk (meta) takes them on the CPU."""
    device = next(model.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def _write(
    model: nn.Module, doing: Generation, prompts: Sequence[Any], with_loss: bool
) -> list[Answer]:
    """Let the model write its answers; with their targets' losses, if asked for."""
    texts = doing.write(model, doing.collate(prompts).to(device_of(model)))
    losses: list[float] | list[None] = [None] * len(prompts)
    if with_loss:
        _, _, losses = _predict(model, doing.inner, [prompt.answer for prompt in prompts])
    return [
        Answer(prompt.number, prompt.target, text, loss=loss)
        for prompt, text, loss in zip(prompts, texts, losses, strict=True)
    ]


def _predict(
    model: nn.Module, task: Task[Any], examples: Sequence[Encoded]
) -> tuple[Batch, Prediction, list[float]]:
    """Run the model on examples: the batch, its prediction and the loss of each example."""
    batch = task.collate(examples).to(device_of(model))
    prediction = task.predict(model, batch)
    losses = prediction.losses("mean" if task.options.length_normalize else "sum")
    return batch, prediction, losses.double().tolist()


def _answer(model: nn.Module, task: Task[Any], examples: Sequence[Encoded]) -> list[Answer]:
    """The model's choices of classes; of a task whose answers are texts, only their losses."""
    batch, prediction, losses = _predict(model, task, examples)
    if task.writes_text:
        return [Answer(n, loss=loss) for n, loss in zip(batch.examples, losses, strict=True)]
    assert prediction.targets is not None
    logits = prediction.logits
    targets: NDArray[np.int64] = prediction.targets.cpu().numpy()
    said: NDArray[np.int64] = logits.argmax(-1).cpu().numpy()
    at_least = torch.promote_types(logits.dtype, torch.float32)
    probabilities: NDArray[np.float32] = logits.softmax(-1, dtype=at_least).float().cpu().numpy()
    answers = []
    for n, (number, loss) in enumerate(zip(batch.examples, losses, strict=True)):
        own, target, prediction_of = probabilities[n], targets[n], said[n]
        if own.ndim == 2:  # one row per token, of which some are none of the task's words
            real = target != IGNORED
            own, target, prediction_of = own[real], target[real], prediction_of[real]
        elif batch.starts is not None:  # others in the batch have more choices
            own = own[: batch.starts[n + 1] - batch.starts[n]]
        # A copy, so that an answer does not keep its whole batch in memory.
        answers.append(Answer(number, target.tolist(), prediction_of.tolist(), own.copy(), loss))
    return answers
