"""Tasks whose answer is text: an input, and the tokens that should follow it."""

from abc import abstractmethod
from dataclasses import dataclass

from matsmerge.tasks.task import Encoded, Task
from matsmerge.tasks.text_encoding import TOKENIZER_FILES, Ids, TextEncoder


@dataclass(frozen=True)
class EncodedAnswer(Encoded):
    """What the model is shown, and what it should say."""

    ids: Ids
    labels: Ids


class AnswerTask(Task[EncodedAnswer]):
    """A task that predicts tokens: its logits are (examples, length, tokens)."""

    files = TOKENIZER_FILES
    encoder: TextEncoder

    @property
    def notes(self) -> list[str]:
        return self.encoder.notes

    @abstractmethod
    def encode_answer(self, number: int, text: str, answer: str) -> EncodedAnswer:
        """One input with one answer to it."""
