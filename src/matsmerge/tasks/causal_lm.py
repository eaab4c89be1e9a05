"""What text does a decoder continue with?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from matsmerge.data.row_values import text_of
from matsmerge.errors import DataError
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.conversation import (
    Message,
    check_template,
    encode_conversation,
    messages_of,
)
from matsmerge.tasks.prediction import IGNORED, Prediction
from matsmerge.tasks.task import TaskOptions, on_device_of
from matsmerge.tasks.text_encoder import Ids, pad_ids
from matsmerge.tasks.text_task import AnswerTask, EncodedAnswer

_CONVERSATIONS = ("messages", "conversations")


class CausalLM(AnswerTask):
    """Columns `input` and `target`, of which the target is predicted; or `text`, all predicted.

    Or `messages` (also called `conversations`), of which the assistant's turns are predicted or,
    with `turns: all`, every token. Input and target are tokenized apart and joined as they are; a
    space between them is part of one of them.
    """

    kind = "causal_lm"
    auto_class = "AutoModelForCausalLM"
    architectures = ("ForCausalLM", "LMHeadModel")
    peft_type = "CAUSAL_LM"
    continues_prompt = True
    required = ()
    optional = ("input", "target", "text", *_CONVERSATIONS)

    def __init__(self, model: nn.Module, folder: Path, options: TaskOptions) -> None:
        super().__init__(model, folder, options)
        if self.encoder.max_length < 2:
            found = self.encoder.max_length
            raise DataError(f"expected a max_length of at least 2, found {found}")
        self._packed: list[str] = []

    def missing_columns(self, found: set[str]) -> list[str]:
        if {"input", "target"} <= found:
            return []
        if found.intersection(_CONVERSATIONS):
            check_template(self.encoder.tokenizer)
            return []
        if "text" in found:
            return []
        return [name for name in ("input", "target") if name not in found] if found else ["text"]

    def prompt_column(self, found: set[str]) -> str | None:
        if "target" not in found and found.intersection(_CONVERSATIONS):
            raise DataError(
                "the data has messages, which the tokenizer's chat template puts into words; give "
                "no template:, or one with a target"
            )
        return "input" if "target" in found else "text"

    def encode(self, row: Mapping[str, Any], number: int) -> EncodedAnswer:
        is_answer = {"input", "target"} <= row.keys()
        # Rows may differ in what they have; formats with fixed columns fill the others with nulls.
        has = [c for c in _CONVERSATIONS if c in row and (row[c] is not None or "text" not in row)]
        conversation = next(iter(has), None)
        if self.options.packing and (is_answer or conversation or "text" not in row):
            raise DataError(
                "packing: joins rows of text alone, and cannot join others; leave it out"
            )
        if conversation is not None and not is_answer:
            return self._encode_messages(number, messages_of(row, conversation))
        if "text" not in row or is_answer:
            return self.encode_answer(number, text_of(row, "input"), text_of(row, "target"))
        ids = self.encoder.encode(number, text_of(row, "text"))["input_ids"]
        if len(ids) < 2:
            raise DataError(f"'text': expected at least two tokens, found {len(ids)}")
        return EncodedAnswer(number, len(ids), ids, [IGNORED, *ids[1:]])

    def _encode_messages(self, number: int, messages: list[Message]) -> EncodedAnswer:
        ids, counted = encode_conversation(self.encoder, messages, self.options.turns)
        if True not in counted[1:]:
            raise DataError(
                "the chat template writes no token that is predicted; leave the conversation out"
            )
        limit, start = self.encoder.max_length, 0
        if len(ids) > limit:
            self.encoder.note_cut(number, len(ids) - limit)
            first = counted.index(True, 1)
            if first >= limit:  # of the first answer up to half a sequence is kept, and what asks
                others = (n for n, one in enumerate(counted[first:]) if not one)
                length = next(others, len(ids) - first)
                start = first + min(length, limit // 2) - limit
        shown = slice(start, start + limit)
        labels = [token if one else IGNORED for token, one in zip(ids, counted, strict=True)][shown]
        return EncodedAnswer(number, len(labels), ids[shown], [IGNORED, *labels[1:]])

    def pack(self, examples: list[EncodedAnswer]) -> list[EncodedAnswer]:
        """Texts one after the other, each with its end, as many as a sequence takes.

        A text sees those before it in its sequence, as in pretraining.
        """
        eos, limit = self.encoder.tokenizer.eos_token_id, self.encoder.max_length
        if not self.options.packing:
            return examples
        if eos is None:
            raise DataError("packing: the tokenizer has no token that ends a text; leave it out")
        packed: list[Ids] = []
        for example in examples:
            ids = example.ids if example.ids[-1] == eos else [*example.ids, eos][:limit]
            if packed and len(packed[-1]) + len(ids) <= limit:
                packed[-1] += ids
            else:
                packed.append(list(ids))
        self._packed.append(
            f"{len(examples)} texts were packed into {len(packed)} sequences, each an example"
        )
        return [
            EncodedAnswer(number, len(ids), ids, [IGNORED, *ids[1:]])
            for number, ids in enumerate(packed)
        ]

    @property
    def notes(self) -> list[str]:
        return [*super().notes, *self._packed]

    def encode_answer(self, number: int, text: str, answer: str) -> EncodedAnswer:
        eos = self.encoder.tokenizer.eos_token_id
        prompt = self.encode_prompt(number, text)
        answer_ids = self.encoder.ids(answer, special=False)
        answer_ids += [] if eos is None else [eos]
        if not answer_ids:
            raise DataError("the answer has no tokens")
        limit = self.encoder.max_length
        if len(prompt) + len(answer_ids) > limit:
            self.encoder.note_cut(number, len(prompt) + len(answer_ids) - limit)
            answer_ids = answer_ids[: limit - 1]
            prompt = prompt[-(limit - len(answer_ids)) :]
        ids = prompt + answer_ids
        return EncodedAnswer(number, len(ids), ids, [IGNORED] * len(prompt) + answer_ids)

    def encode_prompt(self, number: int, text: str) -> Ids:  # noqa: ARG002
        tokenizer = self.encoder.tokenizer
        eos = tokenizer.eos_token_id
        # The end of a prompt, where the question is, says most about the answer.
        prompt = self.encoder.ids(text, from_end=True)
        if eos is not None and prompt[-1:] == [eos] and not text.endswith(tokenizer.eos_token):
            prompt = prompt[:-1]  # the text goes on
        if prompt:
            return prompt
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else eos
        if start is None:
            raise DataError("the input has no tokens, and the tokenizer none to begin with")
        return [start]

    def collate(self, examples: Sequence[EncodedAnswer]) -> Batch:
        targets = pad_ids([example.labels for example in examples], IGNORED)[:, 1:]
        return self.pad(examples, [{"input_ids": example.ids} for example in examples], targets)

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        logits: Tensor = model(**batch.inputs).logits[:, :-1]
        return Prediction(logits, on_device_of(logits, batch.targets))
