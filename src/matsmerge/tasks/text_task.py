"""Tasks about text, and among them those whose answer is text too."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from matsmerge.tasks.batch import Batch
from matsmerge.tasks.prediction import Prediction, Reduction
from matsmerge.tasks.task import E, Encoded, Task, TaskOptions
from matsmerge.tasks.text_encoder import TOKENIZER_FILES, Ids, TextEncoder


class TextTask(Task[E]):
    """A task whose rows become token ids."""

    files = TOKENIZER_FILES

    def __init__(self, model: nn.Module, folder: Path, options: TaskOptions) -> None:
        super().__init__(model, folder, options)
        self.encoder = TextEncoder.for_model(model, folder, options.max_length)

    @property
    def notes(self) -> list[str]:
        return self.encoder.notes

    def pad(
        self, examples: Sequence[E], features: Sequence[Mapping[str, Ids]], targets: Tensor | None
    ) -> Batch:
        """Examples with these features as one batch."""
        inputs = self.encoder.pad(features)
        numbers = [example.number for example in examples]
        return Batch(inputs, numbers, targets, [inputs["attention_mask"].bool()])


@dataclass(frozen=True)
class EncodedAnswer(Encoded):
    """What the model is shown, and what it should say."""

    ids: Ids
    labels: Ids


class AnswerTask(TextTask[EncodedAnswer]):
    """A task that predicts the tokens that should follow an input.

    Its logits are (examples, length, tokens).
    """

    metrics = ("loss", "exact_match")
    writes_text = True
    measure = "negative loss"
    prompt = "input"
    continues_prompt: ClassVar[bool] = False  # prompt and answer are one sequence

    def validation_values(self, said: Prediction, reduction: Reduction) -> Tensor:
        return -said.losses(reduction).double()

    @abstractmethod
    def encode_prompt(self, number: int, text: str) -> Ids:
        """An input alone, as the model is shown it before it answers."""

    @abstractmethod
    def encode_answer(self, number: int, text: str, answer: str) -> EncodedAnswer:
        """One input with one answer to it."""
