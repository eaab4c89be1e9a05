"""Tasks whose answer is text: an input, and the tokens that should follow it."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from matsmerge.tasks.prediction import Prediction, Reduction
from matsmerge.tasks.task import Encoded, Task
from matsmerge.tasks.text_encoder import TOKENIZER_FILES, Ids, TextEncoder


@dataclass(frozen=True)
class EncodedAnswer(Encoded):
    """What the model is shown, and what it should say."""

    ids: Ids
    labels: Ids


class AnswerTask(Task[EncodedAnswer]):
    """A task that predicts tokens: its logits are (examples, length, tokens)."""

    files = TOKENIZER_FILES
    metrics = ("loss", "exact_match")
    writes_text = True
    measure = "negative loss"
    continues_prompt: ClassVar[bool] = False  # prompt and answer are one sequence

    encoder: TextEncoder

    @property
    def notes(self) -> list[str]:
        return self.encoder.notes

    def validation_values(self, said: Prediction, reduction: Reduction) -> Tensor:
        return -said.losses(reduction).double()

    @abstractmethod
    def encode_prompt(self, number: int, text: str) -> Ids:
        """An input alone, as the model is shown it before it answers."""

    @abstractmethod
    def encode_answer(self, number: int, text: str, answer: str) -> EncodedAnswer:
        """One input with one answer to it."""
