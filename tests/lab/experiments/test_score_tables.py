"""What a suite's scores say, in tables and in a sentence."""

import itertools
from typing import Any

from matsmerge.lab.experiments.score_tables import score_tables, verdicts, without_noise
from matsmerge.lab.experiments.suite_results import (
    Intermediate,
    MethodRow,
    Scores,
    SuiteResults,
    VariantResults,
)
from matsmerge.lab.reports.numbers import fixed


def suite(**variants: VariantResults) -> SuiteResults:
    return SuiteResults(name="s", title="t", about="a", suite={}, seeds=[0, 1], variants=variants)


def rows(**means: tuple[float, ...]) -> list[MethodRow]:
    """Two tasks with the same score, for each seed."""
    return [
        MethodRow(method=method, seed=seed, test=Scores(tasks={"a": value, "b": value}, errors={}))
        for method, values in means.items()
        for seed, value in enumerate(values)
    ]


def variant(**content: Any) -> VariantResults:
    return VariantResults(tasks=["a", "b"], **content)


def test_a_mean_between_two_numbers_is_shown_the_same_everywhere() -> None:
    scores = [169 / 300, 186 / 300, 186 / 300, 188 / 300]
    for order in itertools.permutations(scores):
        mean = sum(order) / 4
        percents = (100 * mean, sum(100 * score for score in order) / 4)
        assert [f"{without_noise(value):.1f}" for value in percents] == ["60.8", "60.8"]
        row = MethodRow(
            method="base",
            seed=0,
            test=Scores(tasks=dict(zip("abcd", order, strict=True)), errors={}),
        )
        ((_, _, table),) = score_tables(
            suite(full=VariantResults(tasks=list("abcd"), comparison=[row]))
        )
        assert table[0][-1] == fixed(percents[1]) == "60.8"


def test_the_best_merge_beside_separate_models() -> None:
    found = rows(individual=(0.9, 0.8), average=(0.5, 0.5), ties=(0.6, 0.7), ensemble=(0.99, 0.99))
    full, alone = variant(comparison=found), variant(comparison=rows(average=(0.5,)))
    assert list(verdicts(suite(full=full, ia3=alone, none=variant(comparison=[])))) == [
        "full: best is ties with 65.0 % on test data; a model for each task has 85.0 ± 5.0 %",
        "ia3: best is average with 50.0 % on test data",
    ]
    ((title, header, table), _) = score_tables(suite(full=full, ia3=alone))
    assert title == "full: test accuracy in percent"
    assert list(header) == ["", "a", "b", "mean"]
    assert [row[0] for row in table] == ["average", "ties", "individual", "ensemble"]


def test_a_task_that_others_help() -> None:
    """Training on one and then on the other is no merge."""
    scores = {"sequential": 0.9, "average": 0.6, "ties": 0.7}
    found = [
        Intermediate(donor="d", method=method, seed=0, score=score, error=0.1)
        for method, score in scores.items()
    ]
    (said,) = verdicts(suite(full=variant(intermediate=found, target="a")))
    assert said == "full: best is ties with d with 70.0 % on test data"
