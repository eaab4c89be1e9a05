"""What a suite's scores say, in tables and in a sentence."""

from typing import Any

from matsmerge.lab.experiments.score_tables import score_tables, verdicts
from matsmerge.lab.experiments.suite_results import (
    Intermediate,
    Row,
    Scores,
    SuiteResults,
    VariantResults,
)


def suite(**variants: VariantResults) -> SuiteResults:
    return SuiteResults(name="s", title="t", about="a", suite={}, seeds=[0, 1], variants=variants)


def rows(**means: tuple[float, ...]) -> list[Row]:
    """Two tasks with the same score, for each seed."""
    return [
        Row(method=method, seed=seed, test=Scores(tasks={"a": value, "b": value}, errors={}))
        for method, values in means.items()
        for seed, value in enumerate(values)
    ]


def variant(**content: Any) -> VariantResults:
    return VariantResults(tasks=["a", "b"], **content)


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
