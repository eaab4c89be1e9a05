"""What text does an encoder-decoder answer with?"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.data.row_values import text_of
from matsmerge.errors import DataError
from matsmerge.tasks.answers import AnswerTask, EncodedAnswer
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.prediction import IGNORED
from matsmerge.tasks.task import TaskOptions
from matsmerge.tasks.text_encoder import Ids, TextEncoder, pad_ids

Shift = Callable[[Tensor], Tensor]  # labels to what the decoder is shown, both (sequences, length)


class Seq2Seq(AnswerTask):
    """Columns `input` and `target`; the encoder sees the one, the decoder says the other."""

    kind = "seq2seq"
    auto_class = "AutoModelForSeq2SeqLM"
    architectures = ("ForConditionalGeneration", "Model")
    peft_type = "SEQ_2_SEQ_LM"
    required = ("input", "target")
    prompt = "input"

    def __init__(self, encoder: TextEncoder, shift: Shift, options: TaskOptions) -> None:
        self.encoder = encoder
        self.options = options
        self._shift = shift
        # One less than there are positions, for the column that `collate` may add.
        limit = encoder.max_positions
        self._max_target = min(
            encoder.max_length, encoder.max_length if limit is None else limit - 1
        )

    @classmethod
    def is_for(cls, config: Any) -> bool:
        return bool(getattr(config, "is_encoder_decoder", False)) and super().is_for(config)

    @classmethod
    def for_model(cls, model: nn.Module, folder: Path, options: TaskOptions) -> "Seq2Seq":
        encoder = TextEncoder.for_model(model, folder, options.max_length)
        return cls(encoder, _shift_of(model), options)

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
    try:
        if own is not None:
            own(torch.tensor([[1]]))
            shift: Shift = own
            return shift
        config: Any = model.config
        start, pad = int(config.decoder_start_token_id), int(config.pad_token_id)
    except Exception as error:  # each model has its own way to miss its settings
        raise DataError(
            f"{type(model).__name__} does not know which token its decoder starts with "
            f"({first_line(error)}); set decoder_start_token_id and pad_token_id in config.json"
        ) from error

    def shift_right(labels: Tensor) -> Tensor:
        shifted = labels.roll(1, dims=1)
        shifted[:, 0] = start
        return shifted.masked_fill(shifted == IGNORED, pad)

    return shift_right
