"""What text does an encoder-decoder answer with?"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from matsmerge.data.row_problems import library_errors
from matsmerge.data.row_values import text_of
from matsmerge.errors import DataError
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.prediction import IGNORED
from matsmerge.tasks.task import TaskOptions
from matsmerge.tasks.text_encoder import Ids, pad_ids
from matsmerge.tasks.text_task import AnswerTask, EncodedAnswer

Shift = Callable[[Tensor], Tensor]  # labels to what the decoder is shown, both (sequences, length)


class Seq2Seq(AnswerTask):
    """Columns `input` and `target`; the encoder sees the one, the decoder says the other."""

    kind = "seq2seq"
    auto_class = "AutoModelForSeq2SeqLM"
    architectures = ("ForConditionalGeneration", "Model")
    peft_type = "SEQ_2_SEQ_LM"
    required = ("input", "target")

    def __init__(self, model: nn.Module, folder: Path, options: TaskOptions) -> None:
        super().__init__(model, folder, options)
        self._shift = _shift_of(model)
        # One less than there are positions, for the column that `collate` may add.
        most = self.encoder.max_positions or sys.maxsize
        self._max_target = min(self.encoder.max_length, most - 1)

    @classmethod
    def is_for(cls, config: Any) -> bool:
        return bool(getattr(config, "is_encoder_decoder", False)) and super().is_for(config)

    def encode(self, row: Mapping[str, Any], number: int) -> EncodedAnswer:
        return self.encode_answer(number, text_of(row, "input"), text_of(row, "target"))

    def encode_answer(self, number: int, text: str, answer: str) -> EncodedAnswer:
        ids = self.encode_prompt(number, text)
        labels = self.encoder.encode(number, None, text_target=answer, max_length=self._max_target)[
            "input_ids"
        ]
        for what, found in (("input", ids), ("answer", labels)):
            if not found:
                raise DataError(f"the {what} has no tokens")
        return EncodedAnswer(number, len(ids) + len(labels), ids, labels)

    def encode_prompt(self, number: int, text: str) -> Ids:
        ids: Ids = self.encoder.encode(number, text)["input_ids"]
        return ids

    def collate(self, examples: Sequence[EncodedAnswer]) -> Batch:
        inputs = self.encoder.pad([{"input_ids": example.ids} for example in examples])
        rows = [example.labels for example in examples]
        length = max(map(len, rows))
        # The masks of encoder and decoder are told apart by their shapes.
        length += length == inputs["input_ids"].shape[1]
        targets = pad_ids(rows, IGNORED, length)
        real = targets != IGNORED
        inputs["decoder_input_ids"] = self._shift(targets)
        inputs["decoder_attention_mask"] = real.long()
        return Batch(
            inputs,
            [example.number for example in examples],
            targets,
            [inputs["attention_mask"].bool(), real],
        )


def _shift_of(model: nn.Module) -> Shift:
    """How the model turns labels into what its decoder is shown."""
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    with library_errors(
        f"{type(model).__name__} does not know which token its decoder starts with",
        "; set decoder_start_token_id and pad_token_id in config.json",
    ):
        if own is not None:
            own(torch.tensor([[1]]))
            shift: Shift = own
            return shift
        config: Any = model.config
        start, pad = int(config.decoder_start_token_id), int(config.pad_token_id)

    def shift_right(labels: Tensor) -> Tensor:
        shifted = labels.roll(1, dims=1)
        shifted[:, 0] = start
        return shifted.masked_fill(shifted == IGNORED, pad)

    return shift_right
