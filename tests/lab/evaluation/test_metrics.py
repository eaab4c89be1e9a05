"""Every metric against its plain formula, and by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matsmerge.errors import DataError
from matsmerge.lab.evaluation.metrics import (
    METRICS,
    NUM_RESAMPLES,
    Decisions,
    Score,
    accuracy,
    choose_metrics,
    exact_match,
    f1,
    mcc,
    mean,
    mean_average_precision,
)
from matsmerge.tasks.kinds import TASKS
from matsmerge.tasks.task_file import TaskFile


def decide(
    targets: list[int], tables: list[list[float]], examples: list[int] | None = None
) -> Decisions:
    probabilities = np.array(tables, np.float64)
    return Decisions(
        np.array(targets, np.int64),
        probabilities.argmax(1).astype(np.int64),
        probabilities,
        np.array(examples if examples is not None else range(len(targets)), np.int64),
    )


def plain_f1(targets: list[int], predictions: list[int], num_classes: int) -> float:
    values = []
    for c in range(num_classes):
        pairs = list(zip(targets, predictions, strict=True))
        right = sum(t == c and p == c for t, p in pairs)
        wrong = sum((t == c) != (p == c) for t, p in pairs)
        values.append(2 * right / (2 * right + wrong) if right + wrong else None)
    if num_classes == 2:
        return values[1] or 0.0
    found = [value for value in values if value is not None]
    return sum(found) / len(found)


def plain_mcc(targets: list[int], predictions: list[int], num_classes: int) -> float:
    """Correlation of one-hot vectors."""
    t, p = np.eye(num_classes)[targets], np.eye(num_classes)[predictions]
    t, p = t - t.mean(0), p - p.mean(0)
    spread = (t * t).sum() * (p * p).sum()
    return float((t * p).sum() / math.sqrt(spread)) if spread > 1e-12 else 0.0


def plain_map(targets: list[int], probabilities: np.ndarray) -> float:
    """Precision and recall at every threshold, counted anew."""
    values = []
    for c in range(probabilities.shape[1]):
        is_class = np.array([t == c for t in targets])
        if not is_class.any():
            continue
        total, recall_before = 0.0, 0.0
        for threshold in sorted(set(probabilities[:, c]), reverse=True):
            taken = probabilities[:, c] >= threshold
            recall = (taken & is_class).sum() / is_class.sum()
            total += (recall - recall_before) * (taken & is_class).sum() / taken.sum()
            recall_before = recall
        values.append(total)
    return float(np.mean(values))


@st.composite
def decisions(draw: st.DrawFn) -> Decisions:
    num, num_classes = draw(st.integers(2, 30)), draw(st.integers(2, 4))
    targets = draw(st.lists(st.integers(0, num_classes - 1), min_size=num, max_size=num))
    # Few values, so that there are ties.
    row = st.lists(st.integers(0, 4), min_size=num_classes, max_size=num_classes)
    tables = draw(st.lists(row, min_size=num, max_size=num))
    return decide(targets, [[float(value) for value in row] for row in tables])


@settings(max_examples=30)
@given(decisions())
def test_values(some: Decisions) -> None:
    targets, predictions = some.targets.tolist(), some.predictions.tolist()
    num = some.num_classes
    right = [float(t == p) for t, p in zip(targets, predictions, strict=True)]
    assert accuracy(some).value == pytest.approx(np.mean(right))
    assert accuracy(some).error == pytest.approx(np.std(right, ddof=1) / math.sqrt(len(right)))
    assert f1(some).value == pytest.approx(plain_f1(targets, predictions, num))
    assert mcc(some).value == pytest.approx(plain_mcc(targets, predictions, num), abs=1e-9)
    expected = plain_map(targets, some.probabilities)
    assert mean_average_precision(some).value == pytest.approx(expected)


def test_by_hand() -> None:
    some = decide([1, 0, 1, 1], [[0.1, 0.9], [0.2, 0.8], [0.3, 0.7], [0.6, 0.4]])
    assert accuracy(some).value == 0.5
    assert f1(some).value == pytest.approx(4 / 6)  # two right, one false alarm, one missed
    assert mcc(some).value == pytest.approx((2 * 0 - 1 * 1) / math.sqrt(3 * 3 * 1 * 1))
    # Class 1 is found at ranks 1, 3 and 4; class 0 at rank 3.
    ones, zeros = (1 + 2 / 3 + 3 / 4) / 3, 1 / 3
    assert mean_average_precision(some).value == pytest.approx((ones + zeros) / 2)


def test_perfect_and_constant() -> None:
    perfect = decide([0, 1, 2, 1], np.eye(3)[[0, 1, 2, 1]].tolist())
    assert [m(perfect).value for m in (accuracy, f1, mcc, mean_average_precision)] == [1] * 4
    constant = decide([0, 1, 0], [[0.9, 0.1]] * 3)
    assert mcc(constant) == Score(0.0, 0.0)
    assert f1(constant).value == 0.0


@pytest.mark.parametrize("num_classes", [2, 3, 4])
def test_errors_of_resamples(num_classes: int) -> None:
    """Resamples written out, example by example."""
    g = np.random.default_rng(num_classes)
    tables = g.integers(0, 5, (12, num_classes)).astype(float).tolist()
    some = decide(g.integers(num_classes, size=12).tolist(), tables)
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {"f1": [], "mcc": [], "map": []}
    for _ in range(NUM_RESAMPLES):
        drawn = rng.integers(12, size=12)
        targets, said = some.targets[drawn].tolist(), some.predictions[drawn].tolist()
        found["f1"].append(plain_f1(targets, said, num_classes))
        found["mcc"].append(plain_mcc(targets, said, num_classes))
        found["map"].append(plain_map(targets, some.probabilities[drawn]))
    for name, values in found.items():
        assert np.std(values) > 0.01
        assert METRICS[name].of(some).error == pytest.approx(np.std(values, ddof=1))


def test_words_of_one_example_belong_together() -> None:
    # Three examples of 3, 1 and 2 words, of which 3, 0 and 1 are right.
    some = decide([0, 0, 0, 1, 0, 1], [[1.0, 0.0]] * 6, [0, 0, 0, 1, 2, 2])
    found = accuracy(some)
    assert found.value == pytest.approx(4 / 6)
    deviations = [3 - 3 * 4 / 6, 0 - 4 / 6, 1 - 2 * 4 / 6]
    spread = sum(d * d for d in deviations) * 3 / 2
    assert found.error == pytest.approx(math.sqrt(spread) / 6)
    assert some.num_examples == 3


def test_one_example_has_no_error() -> None:
    one = decide([1], [[0.4, 0.6]])
    assert all(math.isnan(m(one).error) for m in (accuracy, f1, mcc, mean_average_precision))
    assert math.isnan(mean(np.array([2.0])).error)


def test_texts_and_losses() -> None:
    found = exact_match([(" a  b\n", "a b"), ("a", "A"), ("", " "), ("ab", "a b")])
    assert found.value == 0.5
    assert found.error == pytest.approx(math.sqrt(4 * 0.25 / 3) / 2)
    assert mean(np.array([1.0, 2.0, 6.0])).value == 3.0
    assert mean(np.array([1.0, 2.0, 6.0])).error == pytest.approx(math.sqrt(7 / 3))


@pytest.mark.parametrize(
    ("given_settings", "expected"),
    [
        ({"task": "sequence_classification"}, ["accuracy"]),
        ({"task": "multiple_choice"}, ["accuracy"]),
        ({"task": "token_classification"}, ["accuracy"]),
        ({"task": "seq2seq"}, ["loss"]),
        ({"task": "causal_lm", "generate": 3}, ["exact_match"]),
        ({"task": "seq2seq", "generate": 3, "metrics": ["loss"]}, ["loss"]),
        ({"task": "image_classification", "metrics": ["map", "f1"]}, ["map", "f1"]),
    ],
)  # fmt: skip
def test_defaults(given_settings: dict[str, object], expected: list[str]) -> None:
    assert choose_metrics(TaskFile.model_validate(given_settings)) == expected


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"metrics": ["acuracy"]}, "there is no metric 'acuracy'; did you mean 'accuracy'?"),
        ({"task": "seq2seq", "metrics": ["f1"]}, "'f1' does not fit the task seq2seq; expected loss or exact_match"),
        ({"task": "seq2seq", "metrics": ["exact_match"]}, "needs generated text.*generate: 16"),
        ({"task": "multiple_choice", "metrics": ["exact_match"]}, "does not fit the task multiple_choice"),
        ({"task": "multiple_choice", "generate": 4}, "generate is for seq2seq and causal_lm"),
        ({"metrics": ["loss", "loss"]}, "given twice"),
    ],
)  # fmt: skip
def test_what_does_not_fit(given_settings: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        choose_metrics(TaskFile.model_validate({"name": "x"} | given_settings))
    with pytest.raises(DataError, match="does not fit"):
        choose_metrics(TaskFile(metrics=["accuracy"]), TASKS["causal_lm"])


def test_which_examples_were_right_is_kept() -> None:
    one = [0.2, 0.8]
    alone = accuracy(decide([1, 0, 1], [one, one, one]))
    assert alone.value == pytest.approx(2 / 3)
    assert alone.right == "101"
    assert accuracy(decide([1, 0, 1], [one, one, one], [0, 0, 1])).right == ""  # words
    assert exact_match([("a  b", "a b"), ("c", "d")]).right == "10"
    assert f1(decide([1, 0], [one, one])).right == ""
