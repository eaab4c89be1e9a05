"""Which class is this text, or this pair of texts?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from matsmerge.data.row_values import text_of, value_of
from matsmerge.errors import DataError
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.task import Encoded
from matsmerge.tasks.text_encoder import Ids
from matsmerge.tasks.text_task import TextTask


@dataclass(frozen=True)
class EncodedText(Encoded):
    """Token ids (and segments) of a text, and its class."""

    features: Mapping[str, Ids]
    label: int | None


class SequenceClassification(TextTask[EncodedText]):
    """Columns `text`, optionally `text_pair`, and `label`: a class's number or name."""

    kind = "sequence_classification"
    auto_class = "AutoModelForSequenceClassification"
    architectures = ("ForSequenceClassification",)
    peft_type = "SEQ_CLS"
    main_input = "input_ids"
    has_classes = True
    required = ("text", "label")
    optional = ("text_pair",)
    targets = "label"
    prompt = "text"

    def encode(self, row: Mapping[str, Any], number: int) -> EncodedText:
        text = text_of(row, "text")
        pair = text_of(row, "text_pair") if "text_pair" in row else None
        label = self.labels.number(value_of(row, "label")) if self.options.need_targets else None
        features = self.encoder.encode(number, text, pair)
        length = len(features["input_ids"])
        if not length:
            raise DataError("'text': has no tokens")
        return EncodedText(number, length, features, label)

    def collate(self, examples: Sequence[EncodedText]) -> Batch:
        labels = [example.label for example in examples]
        targets = None if None in labels else torch.tensor(labels)
        return self.pad(examples, [example.features for example in examples], targets)
