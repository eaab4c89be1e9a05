"""The kinds of tasks."""

from typing import Any

from matsmerge.tasks.causal_lm import CausalLM
from matsmerge.tasks.image_classification import ImageClassification
from matsmerge.tasks.multiple_choice import MultipleChoice
from matsmerge.tasks.seq2seq import Seq2Seq
from matsmerge.tasks.sequence_classification import SequenceClassification
from matsmerge.tasks.task import Task
from matsmerge.tasks.token_classification import TokenClassification

TASKS: dict[str, type[Task[Any]]] = {
    "sequence_classification": SequenceClassification,
    "token_classification": TokenClassification,
    "seq2seq": Seq2Seq,
    "causal_lm": CausalLM,
    "multiple_choice": MultipleChoice,
    "image_classification": ImageClassification,
}
