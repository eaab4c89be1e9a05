"""What text does a decoder continue with?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from matsmerge.data.row_values import text_of
from matsmerge.errors import DataError
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.prediction import IGNORED, Prediction
from matsmerge.tasks.task import TaskOptions, on_device_of
from matsmerge.tasks.text_encoder import Ids, pad_ids
from matsmerge.tasks.text_task import AnswerTask, EncodedAnswer


class CausalLM(AnswerTask):
    """Columns `input` and `target`, of which the target is predicted; or `text`, all predicted.

    Input and target are tokenized apart and joined as they are; a space between them is part of
    one of them.
    """

    kind = "causal_lm"
    auto_class = "AutoModelForCausalLM"
    architectures = ("ForCausalLM", "LMHeadModel")
    peft_type = "CAUSAL_LM"
    continues_prompt = True
    required = ()
    optional = ("input", "target", "text")

    def __init__(self, model: nn.Module, folder: Path, options: TaskOptions) -> None:
        super().__init__(model, folder, options)
        if self.encoder.max_length < 2:
            found = self.encoder.max_length
            raise DataError(f"expected a max_length of at least 2, found {found}")

    def missing_columns(self, found: set[str]) -> list[str]:
        if "text" in found or {"input", "target"} <= found:
            return []
        return [name for name in ("input", "target") if name not in found] if found else ["text"]

    def prompt_column(self, found: set[str]) -> str | None:
        return "input" if "target" in found else "text"

    def encode(self, row: Mapping[str, Any], number: int) -> EncodedAnswer:
        if "text" not in row or {"input", "target"} <= row.keys():
            return self.encode_answer(number, text_of(row, "input"), text_of(row, "target"))
        ids = self.encoder.encode(number, text_of(row, "text"))["input_ids"]
        if len(ids) < 2:
            raise DataError(f"'text': expected at least two tokens, found {len(ids)}")
        return EncodedAnswer(number, len(ids), ids, [IGNORED, *ids[1:]])

    def encode_answer(self, number: int, text: str, answer: str) -> EncodedAnswer:
        eos = self.encoder.tokenizer.eos_token_id
        prompt = self.encode_prompt(number, text)
        answer_ids = self.encoder.ids(answer, special=False)
        answer_ids += [] if eos is None else [eos]
        if not answer_ids:
            raise DataError("the answer has no tokens")
        limit = self.encoder.max_length
        if len(prompt) + len(answer_ids) > limit:
            self.encoder.truncated.add(number)
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
