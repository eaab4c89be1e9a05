"""What one model answered on one task, example by example; and what several answer together."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matsmerge.errors import DataError
from matsmerge.lab.evaluation.metrics import METRICS, Decisions, Floats, Score

_LEAST = float(np.finfo(np.float32).tiny)  # what a probability of zero in float32 may have been


@dataclass(frozen=True, eq=False)
class Answer:
    """What a model said of one example.

    Target and prediction are a class, a list with the class of each word, or a text.
    """

    number: int  # in the data, from 0
    target: int | list[int] | str | None = None
    prediction: int | list[int] | str | None = None
    probabilities: NDArray[np.float32] | None = None  # (classes,) or (words, classes)
    loss: float | None = None  # negative log-likelihood of the target

    def to_json(self) -> dict[str, Any]:
        """The fields that are not None, for JSON; probabilities keep all digits of float32."""
        content = dict(vars(self))
        if self.probabilities is not None:
            content["probabilities"] = _digits(self.probabilities)
        return {key: value for key, value in content.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Outcome:
    """Answers to all examples, in the order of the data, and which data that was."""

    task: str
    kind: str
    split: str | None
    data: str  # its fingerprint
    answers: Sequence[Answer]

    def __len__(self) -> int:
        return len(self.answers)

    def scores(self, metrics: Iterable[str]) -> dict[str, Score]:
        """The value of each metric, in the order given."""
        return {name: self.score(name) for name in metrics}

    def score(self, metric: str) -> Score:
        """The value of one metric."""
        return METRICS[metric].of(getattr(self, METRICS[metric].needs)())

    def decisions(self) -> Decisions:
        """Targets and predictions of all examples and words, in one row."""
        tables = []
        for answer in self.answers:
            if answer.probabilities is None:
                raise DataError(f"{self.task}: has no probabilities of classes or choices")
            tables.append(np.atleast_2d(answer.probabilities).astype(np.float64))
        widest = max(table.shape[1] for table in tables)
        wide = [np.pad(table, ((0, 0), (0, widest - table.shape[1]))) for table in tables]
        return Decisions(
            np.concatenate([np.atleast_1d(np.array(a.target, np.int64)) for a in self.answers]),
            np.concatenate([np.atleast_1d(np.array(a.prediction, np.int64)) for a in self.answers]),
            np.concatenate(wide),
            np.repeat(np.arange(len(tables)), [len(table) for table in tables]),
        )

    def texts(self) -> list[tuple[str, str]]:
        """The text that the model wrote and the target, for each example."""
        return [(str(answer.prediction), str(answer.target)) for answer in self.answers]

    def losses(self) -> Floats:
        """The loss of each example."""
        return np.array([answer.loss for answer in self.answers], np.float64)

    def to_lines(self) -> Iterator[str]:
        """Lines of JSON: first the task and its data, then one for each example."""
        head = {"task": self.task, "kind": self.kind, "split": self.split, "data": self.data}
        yield json.dumps(head | {"num_examples": len(self)}, ensure_ascii=False)
        for answer in self.answers:
            yield json.dumps(answer.to_json(), ensure_ascii=False)


def ensemble(outcomes: Sequence[Outcome], *, length_normalize: bool = False) -> Outcome:
    """p(y | x) = 1/M sum_m p_m(y | x), for each example, and for each word where there are words.

    The outcomes are of the same rows. With `length_normalize` the loss of an example is the mean
    over its words instead of the sum.
    """
    first = outcomes[0]
    answers = []
    for same in zip(*(outcome.answers for outcome in outcomes), strict=True):
        tables = [answer.probabilities for answer in same if answer.probabilities is not None]
        shapes, targets = {table.shape for table in tables}, {str(a.target) for a in same}
        if len(shapes) > 1 or len(targets) > 1:
            sizes = ", ".join(str(table.shape[-1]) for table in tables)
            raise DataError(
                f"{first.task}: row {same[0].number + 1}: the models differ in its classes or its "
                f"label (they have {sizes} classes)"
            )
        answers.append(_mean(same[0], tables, length_normalize))
    return replace(first, answers=answers)


def _mean(answer: Answer, tables: Sequence[NDArray[np.float32]], length_normalize: bool) -> Answer:
    mean = np.mean(np.stack(tables).astype(np.float64), axis=0)  # (classes,) or (words, classes)
    rows = np.atleast_2d(mean)
    targets = np.atleast_1d(np.array(answer.target, np.int64))
    losses = -np.log(np.maximum(rows[np.arange(len(rows)), targets], _LEAST))
    return Answer(
        answer.number,
        answer.target,
        mean.argmax(-1).tolist(),
        mean.astype(np.float32),
        float(losses.mean() if length_normalize else losses.sum()),
    )


def _digits(values: NDArray[np.float32]) -> Any:
    """Values with nine digits, enough to tell all values of float32 apart."""
    if values.ndim > 1:
        return [_digits(row) for row in values]
    return [float(f"{value:.9g}") for value in values.tolist()]
