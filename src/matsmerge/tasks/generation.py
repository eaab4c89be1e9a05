"""Answers that a model writes itself, word after word, always the likeliest next."""

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.data.row_values import text_of
from matsmerge.errors import DataError
from matsmerge.models.pretrained import quiet
from matsmerge.tasks.answers import AnswerTask, EncodedAnswer
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.prediction import Prediction
from matsmerge.tasks.task import Encoded, Task, TaskOptions
from matsmerge.tasks.text_encoder import Ids


@dataclass(frozen=True)
class EncodedPrompt(Encoded):
    """What the model is shown, and the text it should write."""

    ids: Ids
    target: str
    answer: EncodedAnswer  # the same example with its answer, for the loss


class Generation(Task[EncodedPrompt]):
    """Columns `input` and `target`; the answer to the input is written, not only scored.

    What is shown never depends on the target: a prompt that is too long for the model and
    `max_new_tokens` loses its beginning (a decoder's) or its end (an encoder's).
    """

    required = ("input", "target")
    prompt = "input"

    def __init__(self, inner: AnswerTask, max_new_tokens: int) -> None:
        self.kind = inner.kind  # type: ignore[misc]  # as whatever it answers for
        self.inner = inner
        self.options: TaskOptions = inner.options
        self.max_new_tokens = max_new_tokens
        encoder = inner.encoder
        positions = encoder.max_positions
        # A decoder has the prompt before the answer; an encoder-decoder at least the first token.
        room = sys.maxsize if positions is None else positions - max_new_tokens
        if room < 1:
            raise DataError(
                f"generate: {max_new_tokens} tokens do not fit the {positions} positions of the "
                "model; expected fewer"
            )
        self._max_prompt = min(encoder.max_length, room)

    @classmethod
    def for_model(cls, model: nn.Module, folder: Any, options: TaskOptions) -> "Generation":
        raise NotImplementedError("made from the task it answers for")

    @property
    def notes(self) -> list[str]:
        return self.inner.notes

    def encode(self, row: Mapping[str, Any], number: int) -> EncodedPrompt:
        text, target = text_of(row, "input"), text_of(row, "target")
        answer = self.inner.encode_answer(number, text, target)
        if not self.inner.continues_prompt:
            return EncodedPrompt(number, answer.length, answer.ids, target, answer)
        prompt = self.inner.encode_prompt(number, text)
        if len(prompt) > self._max_prompt:
            self.inner.encoder.truncated.add(number)
            prompt = prompt[-self._max_prompt :]
        return EncodedPrompt(number, len(prompt) + self.max_new_tokens, prompt, target, answer)

    def collate(self, examples: Sequence[EncodedPrompt]) -> Batch:
        """Decoders go on from the end of a row, so theirs are padded on the left."""
        longest = max(len(example.ids) for example in examples)
        ids, mask = [], []
        for example in examples:
            padding = [0] * (longest - len(example.ids))
            fill, real = [self.inner.encoder.pad_id] * len(padding), [1] * len(example.ids)
            ids.append(fill + example.ids if self.inner.continues_prompt else example.ids + fill)
            mask.append(padding + real if self.inner.continues_prompt else real + padding)
        inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        return Batch(inputs, [example.number for example in examples])

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        raise NotImplementedError("texts are written by `write`, and scored by the inner task")

    def write(self, model: nn.Module, batch: Batch) -> list[str]:
        """The model's answers."""
        writer: Any = model
        tokenizer = self.inner.encoder.tokenizer
        settings = self._settings(writer)
        try:
            with quiet():
                written: Tensor = writer.generate(**batch.inputs, generation_config=settings)
        except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
            raise DataError(
                f"{type(model).__name__}: cannot generate text ({first_line(error)})"
            ) from error
        start = batch.inputs["input_ids"].shape[1] if self.inner.continues_prompt else 1
        ends = _as_list(settings.eos_token_id)
        texts = []
        for row in written[:, start:].tolist():
            end = next((t for t, token in enumerate(row) if token in ends), len(row))
            texts.append(tokenizer.decode(row[:end], skip_special_tokens=True))
        return texts

    def _settings(self, model: Any) -> Any:
        """The model's own settings, but greedy and without other limits."""
        settings = copy.deepcopy(model.generation_config)
        greedy = {"do_sample": False, "num_beams": 1, "max_length": None, "min_length": 0}
        unused = ("temperature", "top_k", "top_p", "min_p", "typical_p")
        for key, value in (greedy | dict.fromkeys(unused)).items():
            setattr(settings, key, value)
        settings.max_new_tokens = self.max_new_tokens
        settings.use_cache = True
        encoder = self.inner.encoder
        if settings.eos_token_id is None:
            settings.eos_token_id = encoder.tokenizer.eos_token_id
        settings.pad_token_id = encoder.pad_id
        return settings


def _as_list(ids: Any) -> list[int]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, (list, tuple)) else [int(ids)]
