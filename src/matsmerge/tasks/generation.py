"""Answers that a model writes itself, word after word, always the likeliest next."""

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.data.row_values import text_of
from matsmerge.errors import DataError
from matsmerge.models.pretrained import quiet
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.task import Encoded, RowReader
from matsmerge.tasks.text_encoder import Ids
from matsmerge.tasks.text_task import AnswerTask, EncodedAnswer


@dataclass(frozen=True)
class EncodedPrompt(Encoded):
    """What the model is shown, and the text it should write."""

    ids: Ids
    target: str
    answer: EncodedAnswer  # the same example with its answer, for the loss


class Generation(RowReader[EncodedPrompt]):
    """Columns `input` and `target`; the answer to the input is written, not only scored.

    What is shown never depends on the target: a prompt that is too long for the model and
    `max_new_tokens` loses its beginning (a decoder's) or its end (an encoder's).
    """

    required = ("input", "target")
    prompt = "input"

    def __init__(self, inner: AnswerTask, max_new_tokens: int) -> None:
        self.inner = inner
        self.kind, self.options = inner.kind, inner.options
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
            self.inner.encoder.note_cut(number, len(prompt) - self._max_prompt)
            prompt = prompt[-self._max_prompt :]
        return EncodedPrompt(number, len(prompt) + self.max_new_tokens, prompt, target, answer)

    def collate(self, examples: Sequence[EncodedPrompt]) -> Batch:
        """Decoders go on from the end of a row, so theirs are padded on the left."""
        step = -1 if self.inner.continues_prompt else 1
        inputs = self.inner.encoder.pad(
            [{"input_ids": example.ids[::step]} for example in examples]
        )
        if self.inner.continues_prompt:
            inputs = {name: ids.flip(1) for name, ids in inputs.items()}
        return Batch(inputs, [example.number for example in examples])

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
        end_ids = settings.eos_token_id
        ends = end_ids if isinstance(end_ids, (list, tuple)) else [end_ids]
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
