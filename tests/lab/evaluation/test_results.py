"""Tables of scores by themselves: averages, ratios, cells, and what is read again."""

import json
import math
from typing import Any

import pytest

from matsmerge.errors import DataError
from matsmerge.lab.evaluation.metrics import Score
from matsmerge.lab.evaluation.results import INDIVIDUAL, Reading, Results, ScoredTask

ACCURACY = Reading()
LOSS = Reading(higher_is_better=False, in_percent=False)


def task(**metrics: Reading) -> ScoredTask:
    return ScoredTask(kind="sequence_classification", metrics=metrics, num_examples=100)


def results(scores: dict[str, dict[str, float | None]], **tasks: ScoredTask) -> Results:
    """Results by the first metric of each task; None: not scored."""
    made = tasks or {name: task(accuracy=ACCURACY) for name in next(iter(scores.values()))}
    found = {
        model: {
            name: {metric: Score(value, 0.03) for metric in made[name].metrics}
            for name, value in by_task.items()
            if value is not None
        }
        for model, by_task in scores.items()
    }
    return Results(made, {model: {"source": model} for model in scores}, found)


def test_averages_and_their_errors() -> None:
    found = results({"a": {"x": 0.5, "y": 0.7, "z": 0.9}}).average("a")
    assert found is not None
    assert found.value == pytest.approx(0.7)
    assert found.error == pytest.approx(0.03 * math.sqrt(3) / 3)  # errors are independent


def test_no_average_of_what_cannot_be_compared() -> None:
    assert results({"a": {"x": 0.5, "y": None}, "b": {"x": 1, "y": 1}}).average("a") is None
    mixed = {"x": task(accuracy=ACCURACY), "y": task(loss=LOSS)}
    assert results({"a": {"x": 0.5, "y": 2.0}}, **mixed).average("a") is None
    losses = {"x": task(loss=LOSS), "y": task(loss=LOSS)}
    average = results({"a": {"x": 1.0, "y": 2.0}}, **losses).average("a")
    assert average is not None
    assert average.value == 1.5


def test_what_share_of_individual_models_is_reached() -> None:
    made = results({INDIVIDUAL: {"x": 0.8, "y": 0.5}, "merged": {"x": 0.4, "y": 0.5}})
    assert made.normalised("merged") == pytest.approx((0.5 + 1.0) / 2)
    assert made.normalised(INDIVIDUAL) == 1.0
    assert made.verdict == ("merged reaches 75.0% of what a model of its own for each task does")


def test_of_losses_the_lower_is_the_better() -> None:
    made = results({INDIVIDUAL: {"x": 1.0}, "merged": {"x": 2.0}}, x=task(loss=LOSS))
    assert made.normalised("merged") == 0.5


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({"a": {"x": 0.5}}, None),  # nothing to compare with
        ({INDIVIDUAL: {"x": None}, "a": {"x": 0.5}}, None),
        ({INDIVIDUAL: {"x": 0.5, "y": None}, "a": {"x": 0.25, "y": 1}}, 0.5),
        ({INDIVIDUAL: {"x": 0.5}, "a": {"x": None}}, None),
        ({INDIVIDUAL: {"x": 0.0}, "a": {"x": 0.5}}, None),
        ({INDIVIDUAL: {"x": -0.5}, "a": {"x": 0.5}}, None),  # a correlation may be negative
    ],
)
def test_where_there_is_no_share(scores: Any, expected: float | None) -> None:
    tasks = {name: task(accuracy=ACCURACY) for name in scores["a"]}
    made = results(scores, **tasks)
    assert made.normalised("a") == expected
    assert ("reaches" in str(made.verdict)) == (expected is not None)


def test_a_model_that_broke_is_not_the_best() -> None:
    made = results({INDIVIDUAL: {"x": 0.8}, "broken": {"x": math.nan}, "merged": {"x": 0.4}})
    assert made.verdict == "merged reaches 50.0% of what a model of its own for each task does"
    alone = results({INDIVIDUAL: {"x": 0.8}, "broken": {"x": math.nan}})
    assert alone.verdict is None


def test_cells() -> None:
    made = results({INDIVIDUAL: {"x": 0.8, "y": 0.5}, "merged": {"x": 0.4, "y": None}})
    heads, rows = made.cells()
    assert heads == ["model", "x", "y", "average", "normalised"]
    assert [row[0] for row in rows] == [INDIVIDUAL, "merged"]
    assert rows[0][1].startswith("80.0")
    assert rows[1][2:] == ["-", "-", "-"]
    assert made.title == "accuracy in percent ± standard error"


def test_several_metrics_are_named() -> None:
    made = results({"a": {"x": 0.5}}, x=task(accuracy=ACCURACY, loss=LOSS))
    heads, ((_, first, second),) = made.cells()
    assert heads == ["model", "x accuracy", "x loss"]
    assert first != second
    assert made.title == "scores ± standard error"
    assert repr(made) == "<Results a on x>"
    assert "x accuracy" in made._repr_html_()


def test_tables_beside_each_other() -> None:
    one = results({"a": {"x": 0.5}, "b": {"x": 0.6}})
    other = results({"b": {"y": 0.7}, "c": {"y": 0.8}})
    both = one.beside(other)
    assert list(both.tasks) == ["x", "y"]
    assert list(both.scores) == ["a", "b", "c"]
    assert both.score("b", "y") == Score(0.7, 0.03)
    assert both.score("a", "y") is None
    with pytest.raises(DataError, match="two tasks are named 'x'; rename one"):
        one.beside(results({"a": {"x": 0.1}}))


def test_what_is_written_is_read_again() -> None:
    made = results({INDIVIDUAL: {"x": 0.8, "y": 0.5}, "merged": {"x": math.nan, "y": None}})
    content = made.to_json()
    again = Results.from_json(json.loads(json.dumps(content)))
    assert json.dumps(again.to_json()) == json.dumps(content)
    assert again.tasks == made.tasks
    assert again.score("merged", "y") is None
    broken = again.score("merged", "x")
    assert broken is not None
    assert math.isnan(broken.value)


@pytest.mark.parametrize("content", [None, [], {}, {"format_version": 2}, {"format_version": "1"}])
def test_other_formats(content: Any) -> None:
    with pytest.raises(
        DataError, match="here: expected results of an evaluation in format 1, found"
    ):
        Results.from_json(content, "here")


def without(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    *path, last = keys
    place = content
    for key in path:
        place = place[key]
    del place[last]
    return content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: without(c, "tasks", "x"), "'a' has scores of an unknown task 'x'"),
        (lambda c: without(c, "scores", "a", "x", "accuracy"), "'a' has no score by 'accuracy' on 'x'"),
        (lambda c: without(c, "scores"), "scores"),
        (lambda c: without(c, "notes"), "notes"),
        (lambda c: c | {"scores": {}}, "scores"),
        (lambda c: c | {"tasks": {}}, "tasks"),
        (lambda c: c | {"models": {"a": 3}}, "models.a"),
        (lambda c: c | {"versions": {"torch": 2}}, "versions.torch"),
    ],
)  # fmt: skip
def test_damaged_results(change: Any, message: str) -> None:
    content = change(results({"a": {"x": 0.5, "y": 0.6}}).to_json())
    with pytest.raises(DataError, match=f"here: .*{message}"):
        Results.from_json(content, "here")
