"""How far a merged model's answers are from those of each task's own model; needs no labels.

The score of a task whose own model answers with the distribution p* is the mean over held-out
examples of

    KL(p* || p) = sum_y p*(y | x) (log p*(y | x) - log p(y | x))

where p is the merged model's; of texts, the mean over the tokens of an example.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from matsmerge.errors import DataError, NonFiniteError
from matsmerge.lab.evaluation.metrics import Score, mean
from matsmerge.lab.evaluation.task_evaluation import EvaluationSettings, device_of
from matsmerge.lab.tuning.trial_score import Scorer, ValidationTask
from matsmerge.tasks.batch_order import make_batches
from matsmerge.tasks.loaded_model import LoadedModel
from matsmerge.tasks.prediction import IGNORED, log_softmax
from matsmerge.tasks.task import encode_all

DIVERGENCE = "divergence"


@dataclass(frozen=True)
class TeacherScorer(Scorer):
    """Scores a merged model by its distance to the models that it was merged from.

    What these answer is computed once, when the first merge is scored, and kept in files: of a
    language model it is the size of the vocabulary for every token.
    """

    teachers: Mapping[str, str]  # by task: where its own model is
    folder: Path  # for what they answer

    needs_targets = False

    @property
    def lower_is_better(self) -> bool:
        return True

    @property
    def in_percent(self) -> bool:
        return False

    def prepare(self) -> None:
        for task in self.tasks:
            self._answers_of_teacher(task)

    def measure(self, loaded: LoadedModel, task: ValidationTask) -> Score:
        wanted = self._answers_of_teacher(task)
        values = []
        for number, (log_p, starts) in enumerate(self._answers(loaded, task)):
            expected = load_file(wanted / f"{number}.safetensors")
            if expected["log_p"].shape != log_p.shape or expected["starts"].tolist() != starts:
                raise DataError(
                    f"{task.name}: the merged model sees its examples otherwise than "
                    f"{self.teachers[task.name]} does (another tokenizer, or other classes), so "
                    "that their answers cannot be compared; tune with labels"
                )
            rows = divergences(expected["log_p"], log_p)
            values += [part.mean() for part in rows.tensor_split(starts[1:-1])]
        found = torch.stack(values)
        if not found.isfinite().all():
            raise NonFiniteError(f"{task.name}: the merged model's answers are no probabilities")
        return mean(found.numpy())

    def _answers_of_teacher(self, task: ValidationTask) -> Path:
        """The folder with what a task's own model answers, a file for each batch."""
        folder, partial = self.folder / task.name, self.folder / f".{task.name}.partial"
        if not folder.exists():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            loaded = self.load(self.teachers[task.name], task)
            for number, (log_p, starts) in enumerate(self._answers(loaded, task)):
                content = {"log_p": log_p, "starts": torch.tensor(starts)}
                save_file(content, partial / f"{number}.safetensors")
            partial.rename(folder)
        return folder

    def _answers(
        self, loaded: LoadedModel, task: ValidationTask
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Log-probabilities of all answers, (rows, classes), and where each example's rows begin.

        An example has one row, or one for each of its tokens; batch by batch.
        """
        num = len(task.data) if self.num_examples is None else self.num_examples
        described, doing = task.described, loaded.task
        examples: list[Any] = encode_all(
            doing,
            task.data,
            described.columns,
            range(min(num, len(task.data))),
            wordings=described.wordings,
        )
        lengths = [example.length for example in examples]
        for indices in make_batches(lengths, self.batch_size, EvaluationSettings.max_tokens):
            batch = doing.collate([examples[i] for i in indices]).to(device_of(loaded.model))
            with torch.no_grad():
                said = doing.predict(loaded.model, batch)
            if said.logits.ndim == 2:
                yield log_softmax(said.logits).float().cpu(), list(range(len(indices) + 1))
                continue
            if said.targets is None:
                raise DataError(f"{task.name}: its rows have no answers, which say what to compare")
            real = said.targets != IGNORED
            starts = [0, *real.sum(1).cumsum(0).tolist()]
            yield log_softmax(said.logits[real]).float().cpu(), starts


def divergences(expected: Tensor, found: Tensor) -> Tensor:
    """KL(p* || p) of every row, in float64, from log-probabilities (rows, classes)."""
    expected, found = expected.double(), found.double()
    terms = expected.exp() * (expected - found)
    # Answers that an example does not have are impossible for both: no part of the sum.
    return torch.where(expected == -torch.inf, 0, terms).sum(1)


def find_teachers(tasks: Sequence[ValidationTask], models: Mapping[str, str]) -> dict[str, str]:
    """Each task's own model: the one of the recipe that has the task's name."""
    DataError.raise_all(
        f"{task.name}: none of the recipe's models has the name of this task, so that its own "
        f"model is not known; call one so (name: {task.name}). There are {', '.join(models)}"
        for task in tasks
        if task.name not in models
    )
    return {task.name: models[task.name] for task in tasks}
