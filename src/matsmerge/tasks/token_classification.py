"""Which class is each word?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from matsmerge.data.row_values import list_of, texts_of
from matsmerge.errors import DataError
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.prediction import IGNORED
from matsmerge.tasks.task import Encoded, TaskOptions
from matsmerge.tasks.text_encoder import Ids, pad_ids
from matsmerge.tasks.text_task import TextTask


@dataclass(frozen=True)
class EncodedWords(Encoded):
    """Token ids (and segments) of words, and the class of each word at its first token."""

    features: Mapping[str, Ids]
    targets: list[int] | None


class TokenClassification(TextTask[EncodedWords]):
    """Columns `tokens`, a list of words, and `labels`, as many numbers or names of classes.

    Labels are used wherever there are any: which tokens are predicted is in them too.
    """

    kind = "token_classification"
    auto_class = "AutoModelForTokenClassification"
    architectures = ("ForTokenClassification",)
    peft_type = "TOKEN_CLS"
    has_classes = True
    required = ("tokens", "labels")
    targets = "labels"

    def __init__(self, model: nn.Module, folder: Path, options: TaskOptions) -> None:
        super().__init__(model, folder, options)
        self._incomplete: set[int] = set()  # numbers of examples
        if not self.encoder.tokenizer.is_fast:
            raise DataError(
                f"{folder}: its tokenizer does not say which tokens belong to which word; "
                "expected one with a tokenizer.json"
            )

    @property
    def notes(self) -> list[str]:
        notes = self.encoder.notes
        if num := len(self._incomplete):
            notes.append(f"{num} examples have words without tokens, which are not predicted")
        return notes

    def encode(self, row: Mapping[str, Any], number: int) -> EncodedWords:
        words = texts_of(row, "tokens")
        if not words:
            raise DataError("'tokens': the list is empty")
        classes = self._classes(row, len(words)) if "labels" in row else None
        features = self.encoder.encode(number, words, is_split_into_words=True)
        word_ids: list[int | None] = features.word_ids()
        firsts = {word: t for t, word in reversed(list(enumerate(word_ids))) if word is not None}
        if len(firsts) < len(words) and number not in self.encoder.truncated:
            self._incomplete.add(number)
        targets = None
        if classes is not None:
            targets = [IGNORED] * len(word_ids)
            for word, t in firsts.items():
                targets[t] = classes[word]
            if all(target == IGNORED for target in targets):
                raise DataError("'tokens': no word has both a token and a label")
        elif self.options.need_targets:
            raise DataError("'labels': there is none in this row")
        return EncodedWords(number, len(word_ids), features, targets)

    def collate(self, examples: Sequence[EncodedWords]) -> Batch:
        found = [example.targets for example in examples if example.targets is not None]
        targets = pad_ids(found, IGNORED) if len(found) == len(examples) else None
        return self.pad(examples, [example.features for example in examples], targets)

    def _classes(self, row: Mapping[str, Any], num_words: int) -> list[int]:
        values = list_of(row, "labels")
        if len(values) != num_words:
            raise DataError(f"'labels': expected {num_words}, one per word, found {len(values)}")
        return [IGNORED if value == IGNORED else self.labels.number(value) for value in values]
