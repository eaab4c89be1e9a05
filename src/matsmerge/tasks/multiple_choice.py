"""Which of several answers is the most likely?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matsmerge.data.labels import Labels
from matsmerge.data.row_problems import quote
from matsmerge.data.row_values import text_of, texts_of, value_of
from matsmerge.errors import DataError
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.causal_lm import CausalLM
from matsmerge.tasks.prediction import Prediction
from matsmerge.tasks.seq2seq import Seq2Seq
from matsmerge.tasks.task import Encoded, Task, TaskOptions, on_device_of
from matsmerge.tasks.text_encoder import TOKENIZER_FILES
from matsmerge.tasks.text_task import AnswerTask, EncodedAnswer


@dataclass(frozen=True)
class EncodedChoices(Encoded):
    """An input with each of its answers, and which is right."""

    answers: list[EncodedAnswer]
    label: int | None

    @property
    def num_choices(self) -> int:
        return len(self.answers)


class MultipleChoice(Task[EncodedChoices]):
    """Columns `input`, `choices` (a list of texts) and `label`, a choice's number or its text.

    The score of a choice is its log-probability as an answer to the input, summed over tokens
    or, with `length_normalize`, averaged; the scores are the logits.
    """

    kind = "multiple_choice"
    required = ("input", "choices", "label")
    targets = "label"
    prompt = "input"
    files = TOKENIZER_FILES
    labels_name_choices = True

    def __init__(self, model: nn.Module, folder: Path, options: TaskOptions) -> None:
        super().__init__(model, folder, options)
        self.answers = self.model_kind(model.config)(model, folder, options)

    @classmethod
    def model_kind(cls, config: Any) -> type[AnswerTask]:
        return Seq2Seq if getattr(config, "is_encoder_decoder", False) else CausalLM

    @property
    def trained_as(self) -> AnswerTask:
        return self.answers

    def trained_example(self, example: EncodedChoices) -> EncodedAnswer:
        """The right answer's text is trained."""
        assert example.label is not None
        return example.answers[example.label]

    @property
    def notes(self) -> list[str]:
        return self.answers.notes

    def encode(self, row: Mapping[str, Any], number: int) -> EncodedChoices:
        text, choices = text_of(row, "input"), texts_of(row, "choices")
        if len(choices) < 2:
            raise DataError(f"'choices': expected at least two, found {len(choices)}")
        label = _label(value_of(row, "label"), choices) if self.options.need_targets else None
        answers = [self.answers.encode_answer(number, text, choice) for choice in choices]
        length = len(answers) * max(answer.length for answer in answers)
        return EncodedChoices(number, length, answers, label)

    def collate(self, examples: Sequence[EncodedChoices]) -> Batch:
        inner = self.answers.collate([answer for example in examples for answer in example.answers])
        assert inner.targets is not None
        labels = [example.label for example in examples]
        return Batch(
            inner.inputs,
            [example.number for example in examples],
            None if None in labels else torch.tensor(labels),
            inner.row_masks,
            [0, *accumulate(len(example.answers) for example in examples)],
            tokens=inner.targets,
        )

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        assert batch.starts is not None
        said = self.answers.predict(model, replace(batch, targets=batch.tokens))
        scores = -said.losses("mean" if self.options.length_normalize else "sum")  # (sequences,)
        starts = torch.tensor(batch.starts, device=scores.device)
        counts = starts.diff()
        example = torch.arange(len(counts), device=scores.device).repeat_interleave(counts)
        choice = torch.arange(len(scores), device=scores.device) - starts[example]
        empty = scores.new_full((len(counts), int(counts.max())), float("-inf"))
        logits = empty.index_put((example, choice), scores)
        return Prediction(logits, on_device_of(logits, batch.targets))


def _label(value: Any, choices: list[str]) -> int:
    """The number of the choice a label stands for."""
    if isinstance(value, str) and choices.count(value) > 1:
        raise DataError(f"label {quote(value)} is several choices; give the number of one")
    numbers = {choice: number for number, choice in enumerate(choices)}
    return Labels(len(choices), numbers, "choice").number(value)
