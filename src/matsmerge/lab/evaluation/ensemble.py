"""Several models asked at once: the mean of their probabilities."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from matsmerge.errors import DataError
from matsmerge.lab.evaluation.outcome import Answer, Outcome

_LEAST = float(np.finfo(np.float32).tiny)  # what a probability of zero in float32 may have been


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
