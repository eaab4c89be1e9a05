"""Scores of what a model answered, each with its standard error.

A mean has the standard error sd/sqrt(n). Where one example has several decisions (words), a mean
over decisions is a ratio of two means over examples, whose error follows from the examples' own
deviations. Other scores are computed again for 200 resamples of the examples, the same every time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from matsmerge.errors import DataError, closest
from matsmerge.tasks.kinds import TASKS, TaskKind
from matsmerge.tasks.task_file import TaskFile

NUM_RESAMPLES = 200
RESAMPLING_SEED = 0

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Score:
    """A value and its standard error, which is NaN if there is only one example."""

    value: float
    error: float
    # Of each example 1 if it was right, else 0; empty where examples are not right or wrong.
    right: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True)
class Decisions:
    """Choices of one of several classes: one for each example, or one for each of its words."""

    targets: Integers  # (decisions,)
    predictions: Integers  # (decisions,)
    probabilities: Floats  # (decisions, classes)
    examples: Integers  # (decisions,): which example each belongs to, from 0

    @property
    def num_examples(self) -> int:
        return int(self.examples.max()) + 1

    @property
    def num_classes(self) -> int:
        return int(self.probabilities.shape[1])


Weighted = Callable[[Decisions, Floats], float]  # weights are (decisions,)


def accuracy(decisions: Decisions) -> Score:
    """The share of decisions that are right."""
    is_right = (decisions.targets == decisions.predictions).astype(np.float64)
    right: Floats = np.bincount(decisions.examples, is_right).astype(np.float64)
    counts = np.bincount(decisions.examples).astype(np.float64)
    score = _ratio(right, counts)
    return _with_right(score, right) if (counts == 1).all() else score


def _ratio(sums: Floats, counts: Floats) -> Score:
    """Sum of sums / sum of counts, over examples; linearised error."""
    num, total = len(sums), float(counts.sum())
    value = float(sums.sum()) / total
    if num < 2:
        return Score(value, math.nan)
    deviations = sums - value * counts
    error = math.sqrt(float((deviations**2).sum()) * num / (num - 1)) / total
    return Score(value, error)


def _with_right(score: Score, right: Floats) -> Score:
    return replace(score, right="".join("1" if one else "0" for one in right))


def _resampled(of: Weighted) -> Callable[[Decisions], Score]:
    """Make a metric of a function of weighted decisions; resampling examples gives its error."""

    def score(decisions: Decisions) -> Score:
        value = of(decisions, np.ones(len(decisions.targets)))
        num = decisions.num_examples
        if num < 2:
            return Score(value, math.nan)
        rng = np.random.default_rng(RESAMPLING_SEED)
        found = []
        for _ in range(NUM_RESAMPLES):
            times = np.bincount(rng.integers(num, size=num), minlength=num).astype(np.float64)
            found.append(of(decisions, times[decisions.examples]))
        return Score(value, float(np.std(found, ddof=1)))

    return score


def _confusion(decisions: Decisions, weights: Floats) -> Floats:  # (targets, predictions)
    num = decisions.num_classes
    pairs = decisions.targets * num + decisions.predictions
    return np.bincount(pairs, weights, num * num).astype(np.float64).reshape(num, num)


@_resampled
def f1(decisions: Decisions, weights: Floats) -> float:
    """2 TP / (2 TP + FP + FN): of class 1 where there are two, else the mean over classes.

    Classes that are neither among the targets nor among the predictions do not count.
    """
    confusion = _confusion(decisions, weights)
    right = np.diag(confusion)
    occurrences = confusion.sum(0) + confusion.sum(1)
    if len(right) == 2:
        return float(2 * right[1] / occurrences[1]) if occurrences[1] else 0.0
    there = occurrences > 0
    return float((2 * right[there] / occurrences[there]).mean())


@_resampled
def mcc(decisions: Decisions, weights: Floats) -> float:
    """Matthews' correlation of targets and predictions, for any number of classes; 0 if constant.

    Gorodkin, "Comparing two K-category assignments by a K-category correlation coefficient", 2004.
    """
    confusion = _confusion(decisions, weights)
    total = confusion.sum()
    said, true = confusion.sum(0), confusion.sum(1)
    spread = (total**2 - (said**2).sum()) * (total**2 - (true**2).sum())
    if spread <= 0:
        return 0.0
    return float((np.trace(confusion) * total - said @ true) / math.sqrt(spread))


def mean_average_precision(decisions: Decisions) -> Score:
    """The mean, over classes that occur, of the average precision of ranking by probability.

    AP = sum over thresholds of (R_n - R_(n-1)) P_n, without interpolation.
    """
    precisions = [_average_precision(decisions, n) for n in range(decisions.num_classes)]

    def of(_: Decisions, weights: Floats) -> float:
        found = [precision(weights) for precision in precisions]
        return float(np.mean([value for value in found if not math.isnan(value)]))

    return _resampled(of)(decisions)


def _average_precision(decisions: Decisions, number: int) -> Callable[[Floats], float]:
    """One class's average precision as a function of weights; decisions are ranked only once."""
    scores = decisions.probabilities[:, number]
    order = np.argsort(-scores, kind="stable")
    is_class = (decisions.targets[order] == number).astype(np.float64)
    # Where each run of equal probabilities ends.
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)

    def of(weights: Floats) -> float:
        own = weights[order]
        hits = np.cumsum(own * is_class)[last]
        seen = np.cumsum(own)[last]
        if hits[-1] == 0:
            return math.nan  # the class does not occur
        # Thresholds before the first weighted decision have seen nothing, and gain nothing.
        precision = hits / np.maximum(seen, 1.0)
        return float((np.diff(hits, prepend=0.0) * precision).sum() / hits[-1])

    return of


def exact_match(texts: Sequence[tuple[str, str]]) -> Score:
    """The share of texts that equal their targets, white space aside."""
    equal = [" ".join(said.split()) == " ".join(target.split()) for said, target in texts]
    right = np.array(equal, np.float64)
    return _with_right(mean(right), right)


def mean(values: Floats) -> Score:
    """The mean of one value per example."""
    return _ratio(values, np.ones_like(values))


@dataclass(frozen=True)
class Metric:
    """How a score is computed, and how to read it; each kind of task names its metrics."""

    of: Callable[[Any], Score]
    needs: Literal["decisions", "texts", "losses"]
    higher_is_better: bool = True
    in_percent: bool = True
    same_classes: bool = False  # class n must mean the same in every example


METRICS: dict[str, Metric] = {
    "accuracy": Metric(accuracy, "decisions"),
    "f1": Metric(f1, "decisions", same_classes=True),
    "mcc": Metric(mcc, "decisions", same_classes=True),
    "map": Metric(mean_average_precision, "decisions", same_classes=True),
    "exact_match": Metric(exact_match, "texts"),
    "loss": Metric(mean, "losses", higher_is_better=False, in_percent=False),
}


def choose_metrics(task_file: TaskFile, kind: TaskKind | None = None) -> list[str]:
    """The metrics of a task, checked; by default what is usual for its kind.

    The kind is what the model does, where the task file leaves it open; while that is not known,
    only names are checked, and the default is accuracy.
    """
    name, metrics = task_file.title, task_file.metrics
    kind, generates = kind or task_file.kind, task_file.generate is not None
    problems = []
    if generates and kind is not None and not kind.writes_text:
        writing = [k for k, other in TASKS.items() if other.writes_text]
        problems.append(
            f"{name}: generate is for {' and '.join(writing)}; the task is {kind.kind}, whose "
            "answers are chosen, not written"
        )
    for metric in metrics or ():
        if metric not in METRICS:
            problems.append(f"{name}: there is no metric '{metric}'{closest(metric, METRICS)}")
        elif kind is not None and metric not in kind.metrics:
            problems.append(
                f"{name}: the metric '{metric}' does not fit the task {kind.kind}; "
                f"expected {' or '.join(kind.metrics)}"
            )
        elif METRICS[metric].needs == "texts" and not generates:
            problems.append(
                f"{name}: the metric '{metric}' needs generated text; say how many tokens to "
                "answer with in the task file, e.g. generate: 16"
            )
    if metrics and len(set(metrics)) < len(metrics):
        problems.append(f"{name}: a metric is given twice: {', '.join(metrics)}")
    DataError.raise_all(problems)
    if metrics or kind is None:
        return list(metrics or ("accuracy",))
    fitting = [m for m in kind.metrics if (METRICS[m].needs == "texts") == generates]
    return fitting[:1]
