"""Outcomes kept on disk, ensembles of them, and tables of results."""

import json
import math
from typing import Any

import numpy as np
import pytest

from matsmerge.errors import DataError
from matsmerge.lab.evaluation.metrics import Score
from matsmerge.lab.evaluation.outcome import Answer, Outcome, ensemble
from matsmerge.lab.evaluation.results import Reading, Results, ScoredTask

CLASSES = "sequence_classification"


def outcome(tables: list[Any], targets: list[Any], **changes: Any) -> Outcome:
    answers = []
    for number, (table, target) in enumerate(zip(tables, targets, strict=True)):
        probabilities = np.array(table, np.float32)
        loss = -float(np.log(probabilities[target])) if isinstance(target, int) else 1.0
        answers.append(
            Answer(number, target, probabilities.argmax(-1).tolist(), probabilities, loss)
        )
    settings: dict[str, Any] = {"task": "x", "kind": CLASSES, "split": "test", "data": "f" * 64}
    return Outcome(**{**settings, **changes}, answers=answers)


def test_lines_keep_every_digit() -> None:
    rng = np.random.default_rng(0)
    classes = outcome(rng.dirichlet([0.1] * 3, 50).tolist(), rng.integers(3, size=50).tolist())
    words = outcome([rng.dirichlet([1] * 3, 2)], [[0, 2]], kind="token_classification")
    texts = Outcome("x", "seq2seq", None, "0", [Answer(0, "é\n", "b  c"), Answer(1, loss=0.1)])
    for given in (classes, words, texts):
        lines = list(given.to_lines())
        assert all("\n" not in line for line in lines)
        head, *answers = map(json.loads, lines)
        assert head["num_examples"] == len(answers) == len(given)
        for answer, content in zip(given.answers, answers, strict=True):
            for key in ("number", "target", "prediction", "loss"):
                assert content.get(key) == getattr(answer, key)
            if answer.probabilities is not None:
                again = np.array(content["probabilities"], np.float32)
                np.testing.assert_array_equal(again, answer.probabilities)


def test_what_an_outcome_lacks() -> None:
    texts = Outcome("x", "seq2seq", None, "0", [Answer(0, "a", "a"), Answer(1, "b", "c")])
    assert texts.score("exact_match").value == 0.5
    with pytest.raises(DataError, match="no probabilities"):
        texts.score("accuracy")


def test_ensemble_by_hand() -> None:
    a = outcome([[0.9, 0.1], [0.2, 0.8], [0.5, 0.4, 0.1]], [0, 0, 2])
    b = outcome([[0.3, 0.7], [0.7, 0.3], [0.1, 0.2, 0.7]], [0, 0, 2])
    c = outcome([[0.1, 0.9], [0.9, 0.1], [0.2, 0.2, 0.6]], [0, 0, 2])
    found = ensemble([a, b, c])
    expected = [[1.3 / 3, 1.7 / 3], [0.6, 0.4], [0.8 / 3, 0.8 / 3, 1.4 / 3]]
    for answer, table in zip(found.answers, expected, strict=True):
        np.testing.assert_allclose(answer.probabilities, table, rtol=1e-6)  # type: ignore[arg-type]
    assert [answer.prediction for answer in found.answers] == [1, 0, 2]
    losses = [-math.log(1.3 / 3), -math.log(0.6), -math.log(1.4 / 3)]
    assert found.losses().tolist() == pytest.approx(losses, rel=1e-6)
    assert found.score("accuracy").value == pytest.approx(2 / 3)


def test_ensemble_of_words() -> None:
    a = outcome([[[0.9, 0.1], [0.2, 0.8]]], [[0, 0]], kind="token_classification")
    b = outcome([[[0.5, 0.5], [0.4, 0.6]]], [[0, 0]], kind="token_classification")
    total = -math.log(0.7) - math.log(0.3)
    assert ensemble([a, b]).answers[0].loss == pytest.approx(total, rel=1e-6)
    normalised = ensemble([a, b], length_normalize=True)
    assert normalised.answers[0].loss == pytest.approx(total / 2, rel=1e-6)
    assert normalised.answers[0].prediction == [0, 1]


def test_certainly_wrong_is_finite() -> None:
    wrong = outcome([[1.0, 0.0]], [0])
    wrong = Outcome(
        "x", CLASSES, "test", "0", [Answer(0, 1, 0, wrong.answers[0].probabilities, 9.0)]
    )
    loss = ensemble([wrong, wrong]).answers[0].loss
    assert loss is not None
    assert 80 < loss < math.inf


def test_ensembles_need_the_same_classes() -> None:
    a = outcome([[0.5, 0.5]], [0])
    for other in (outcome([[0.5, 0.2, 0.3]], [0]), outcome([[0.5, 0.5]], [1])):
        with pytest.raises(DataError, match="row 1: the models differ in its classes or its label"):
            ensemble([a, other])


PERCENT = Reading()
LOSS = Reading.of("loss")


def scored(*values: Any) -> ScoredTask:
    return ScoredTask(**dict(zip(ScoredTask.model_fields, values, strict=False)))


def results(**changes: Any) -> Results:
    tasks = {
        "sst2": scored(CLASSES, {"accuracy": PERCENT}, 100, "test", "sst2.jsonl", "1", 0),
        "cola": scored(CLASSES, {"mcc": PERCENT, "accuracy": PERCENT}, 50, "test", "c", "2", 0),
    }
    scores = {
        "merged": {
            "sst2": {"accuracy": Score(0.8, 0.03, "1101")},
            "cola": {"mcc": Score(0.3, 0.04), "accuracy": Score(0.7, 0.01)},
        },
        "individual": {
            "sst2": {"accuracy": Score(0.9, 0.02)},
            "cola": {"mcc": Score(0.5, math.nan), "accuracy": Score(0.8, 0.01)},
        },
    }
    models = {"merged": {"source": "m"}, "individual": {"sst2": {"source": "a"}}}
    return Results(**{"tasks": tasks, "models": models, "scores": scores, **changes})


def test_averages() -> None:
    found = results()
    average = found.average("merged")
    assert average is not None
    assert average.value == pytest.approx((0.8 + 0.3) / 2)
    assert average.error == pytest.approx(math.sqrt(0.03**2 + 0.04**2) / 2)
    assert found.normalised("merged") == pytest.approx((0.8 / 0.9 + 0.3 / 0.5) / 2)
    assert found.normalised("individual") == 1.0


def test_a_loss_is_better_when_it_is_lower() -> None:
    task = scored("seq2seq", {"loss": LOSS}, 10)
    scores = {row: {"a": {"loss": Score(v, 0.1)}} for row, v in (("m", 4.0), ("individual", 3.0))}
    found = results(tasks={"a": task}, scores=scores)
    assert found.normalised("m") == pytest.approx(0.75)
    mixed = results(tasks={"a": task, "b": results().tasks["sst2"]}, scores={
        "m": {"a": {"loss": Score(4.0, 0.1)}, "b": {"accuracy": Score(0.5, 0.1)}}
    })  # fmt: skip
    assert mixed.average("m") is None  # of things that are not alike
    assert mixed.normalised("m") is None


def test_what_is_missing_is_not_averaged() -> None:
    found = results()
    less = {
        "merged": {"sst2": found.scores["merged"]["sst2"]},
        "individual": found.scores["individual"],
    }
    assert results(scores=less).average("merged") is None
    assert results(scores=less).normalised("merged") is None
    one = {
        "merged": found.scores["merged"],
        "individual": {"sst2": found.scores["individual"]["sst2"]},
    }
    assert results(scores=one).normalised("merged") == pytest.approx(0.8 / 0.9)
    zero = {**found.scores, "individual": {"sst2": {"accuracy": Score(0.0, 0.0)}}}
    assert results(scores=zero).normalised("merged") is None


def test_json_and_back() -> None:
    given = results(arguments={"split": "test"}, versions={"torch": "2"}, notes=["n"])
    text = json.dumps(given.to_json(), allow_nan=False)
    again = Results.from_json(json.loads(text))
    assert json.dumps(again.to_json()) == text
    assert again.tasks == given.tasks
    assert json.loads(text)["averages"]["merged"]["average"]["value"] == pytest.approx(0.55)
    for damaged in (
        {"format_version": 9},
        {"format_version": 1},
        {"format_version": 1, "tasks": 3},
    ):
        with pytest.raises(DataError):
            Results.from_json(damaged)


def test_tables() -> None:
    heads, rows = results().cells()
    assert heads == ["model", "sst2 accuracy", "cola mcc", "cola accuracy", "average", "normalised"]
    assert rows[0] == ["merged", "80.0 ± 3.0", "30.0 ± 4.0", "70.0 ± 1.0", "55.0 ± 2.5", "0.744"]
    assert rows[1][2] == "50.0"
    markdown = results(notes=["careful"]).to_markdown().splitlines()
    assert "| merged | 80.0 ± 3.0 | 30.0 ± 4.0 | 70.0 ± 1.0 | 55.0 ± 2.5 | 0.744 |" in markdown
    assert "- sst2: sequence_classification, 100 examples, split test of sst2.jsonl" in markdown
    assert "- note: careful" in markdown
    one = {"sst2": results().tasks["sst2"]}
    alone = results(tasks=one, scores={"m": {"sst2": {"accuracy": Score(0.8, 0.03)}}})
    assert alone.cells() == (["model", "sst2"], [["m", "80.0 ± 3.0"]])
    assert alone.title == "accuracy in percent ± standard error"


def test_results_side_by_side() -> None:
    other = results(
        tasks={"arc": scored("lm_eval", {"acc": PERCENT}, 9)},
        scores={"merged": {"arc": {"acc": Score(0.4, 0.1)}}},
        models={"merged": {}},
    )
    both = results().beside(other)
    assert list(both.tasks) == ["sst2", "cola", "arc"]
    average = both.average("merged")
    assert average is not None
    assert average.value == pytest.approx((0.8 + 0.3 + 0.4) / 3)
    assert both.models["merged"] == {"source": "m"}
    with pytest.raises(DataError, match="two tasks are named 'cola'"):
        results().beside(results())


def test_a_verdict_for_newcomers() -> None:
    def verdict(**scores: Score) -> str | None:
        by_row = {row: {"sst2": {"accuracy": score}} for row, score in scores.items()}
        return results(tasks={"sst2": results().tasks["sst2"]}, scores=by_row).verdict

    near = verdict(a=Score(0.7, 0.03), b=Score(0.72, 0.04))
    assert near == "best on average: b has 72.0 ± 4.0, not clearly ahead of a with 70.0 ± 3.0"
    far = verdict(a=Score(0.9, 0.03), b=Score(0.72, 0.04), c=Score(0.1, 0.1))
    assert far == "best on average: a has 90.0 ± 3.0, clearly ahead of b with 72.0 ± 4.0"
    alone = verdict(a=Score(0.7, 0.03))
    assert (
        alone == "a has 70.0 ± 3.0 on average; --individual TASK=MODEL says what merging has cost"
    )
    assert verdict(a=Score(math.nan, 0.03), b=Score(0.7, 0.1)) is None
    best = verdict(a=Score(0.8, 0.01), individual=Score(0.9, 0.01))
    assert best == "a reaches 88.9% of what a model of its own for each task does"
