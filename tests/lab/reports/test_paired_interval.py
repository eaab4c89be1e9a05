"""Intervals of differences: against dense formulas, simulation, and tables of Student's t."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from matsmerge.lab.evaluation.metrics import Floats
from matsmerge.lab.reports.paired_interval import Interval, TaskScore, paired_interval

stats: Any = pytest.importorskip("scipy.stats")
Scored = dict[int, dict[str, TaskScore]]


def answers(shares: NDArray[np.bool_]) -> str:
    return "".join("1" if one else "0" for one in shares)


def scored(right: dict[int, dict[str, str]]) -> Scored:
    return {
        seed: {
            task: TaskScore(text.count("1") / len(text), None, text) for task, text in tasks.items()
        }
        for seed, tasks in right.items()
    }


def draw(seed: int, num: int, share: float) -> str:
    return answers(np.random.default_rng(seed).random(num) < share)


def test_of_one_seed_it_is_the_paired_t_interval() -> None:
    ours, theirs = draw(1, 300, 0.8), draw(2, 300, 0.7)
    found = paired_interval(scored({0: {"a": ours}}), scored({0: {"a": theirs}}))
    assert found is not None
    d = np.array([int(x) - int(y) for x, y in zip(ours, theirs, strict=True)])
    low, high = stats.t.interval(0.95, 299, d.mean(), stats.sem(d))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert found.difference == pytest.approx(d.mean())
    assert found.over == "paired over 300 examples"


def test_tasks_are_averaged_and_their_errors_added() -> None:
    ours = {"a": draw(1, 200, 0.8), "b": draw(2, 500, 0.6)}
    theirs = {"a": draw(3, 200, 0.7), "b": draw(4, 500, 0.6)}
    found = paired_interval(scored({0: ours}), scored({0: theirs}))
    assert found is not None
    d = [np.array(list(map(int, ours[t]))) - np.array(list(map(int, theirs[t]))) for t in "ab"]
    error = math.sqrt(sum(stats.sem(one) ** 2 for one in d)) / 2
    assert found.difference == pytest.approx(np.mean([one.mean() for one in d]))
    assert found.high - found.difference == pytest.approx(1.963 * error, rel=1e-3)
    assert found.over == "paired over 200 to 500 examples a task"


def test_pairing_makes_it_narrower_where_models_agree() -> None:
    base = np.random.default_rng(0).random(400)
    ours, theirs = answers(base < 0.80), answers(base < 0.78)
    paired = paired_interval(scored({0: {"a": ours}}), scored({0: {"a": theirs}}))
    error = math.sqrt(0.8 * 0.2 / 400)
    loose = paired_interval({0: {"a": TaskScore(0.8, error)}}, {0: {"a": TaskScore(0.78, error)}})
    assert paired is not None
    assert loose is not None
    assert paired.high - paired.low < 0.4 * (loose.high - loose.low)
    assert not paired.has_zero
    assert loose.has_zero
    assert loose.high - loose.difference == pytest.approx(1.96 * math.sqrt(2) * error)
    assert loose.over.startswith("not paired")


def test_seeds_alone_have_few_degrees_of_freedom() -> None:
    ours: Scored = {s: {"a": TaskScore(v)} for s, v in enumerate((0.80, 0.83, 0.78))}
    theirs: Scored = {s: {"a": TaskScore(v)} for s, v in enumerate((0.75, 0.77, 0.76))}
    found = paired_interval(ours, theirs)
    assert found is not None
    d = [0.05, 0.06, 0.02]
    low, high = stats.t.interval(0.95, 2, np.mean(d), stats.sem(d))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-3)
    assert found.over == "paired over 3 seeds"


def crossed(rng: np.random.Generator) -> Floats:  # (seeds, examples)
    """Every seed sees the same examples."""
    return 0.1 * rng.normal(size=(4, 1)) + rng.normal(size=(1, 60)) + rng.normal(size=(4, 60))


def nested(rng: np.random.Generator) -> Floats:
    """Every seed has examples of its own."""
    return 0.1 * rng.normal(size=(4, 1)) + math.sqrt(2) * rng.normal(size=(4, 60))


@pytest.mark.parametrize("make", [crossed, nested])
def test_the_variance_of_seeds_and_examples_is_not_biased(
    make: Callable[[np.random.Generator], Floats],
) -> None:
    """The mean of what is estimated is the variance of the mean, over many repetitions."""
    from matsmerge.lab.reports import paired_interval as module

    rng = np.random.default_rng(0)
    variances, means = [], []
    for _ in range(3000):
        d = make(rng)
        of_examples = module._variance(d.mean(0)) - module._rest(d)
        variances.append(of_examples + module._variance(d.mean(1)))
        means.append(d.mean())
    true = np.var(means)
    assert np.mean(variances) == pytest.approx(true, rel=0.1)


def test_examples_and_seeds_together() -> None:
    ours = {s: {"a": draw(s, 100, 0.8)} for s in range(3)}
    theirs = {s: {"a": draw(10 + s, 100, 0.7)} for s in range(3)}
    found = paired_interval(scored(ours), scored(theirs))
    assert found is not None
    assert found.over == "paired over 100 examples and 3 seeds"
    assert found.low < found.difference < found.high


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {0: {"a": TaskScore(0.5, 0.1)}}),
        ({1: {"a": TaskScore(0.5, 0.1)}}, {0: {"a": TaskScore(0.5, 0.1)}}),
        ({0: {"b": TaskScore(0.5, 0.1)}}, {0: {"a": TaskScore(0.5, 0.1)}}),
        ({0: {"a": TaskScore(math.nan, 0.1)}}, {0: {"a": TaskScore(0.5, 0.1)}}),
        ({0: {"a": TaskScore(0.5)}}, {0: {"a": TaskScore(0.5)}}),
    ],
)
def test_what_is_not_known_has_no_interval(ours: Scored, theirs: Scored) -> None:
    assert paired_interval(ours, theirs) is None


def test_the_same_model_is_level_with_itself() -> None:
    same = scored({0: {"a": draw(1, 50, 0.5)}})
    found = paired_interval(same, same)
    assert found is not None
    assert (found.low, found.high) == (0, 0)
    assert found.times(100) == Interval(0.0, 0.0, 0.0, found.over)


def test_students_t() -> None:
    from matsmerge.lab.reports.paired_interval import _half_width

    for freedom in (1, 2, 7, 29, 30, 31, 100, 10**6):
        assert _half_width([(1.0, freedom)]) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-3)
    assert _half_width([(0.0, 5)]) == 0
