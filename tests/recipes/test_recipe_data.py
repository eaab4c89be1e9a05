"""Data of models in recipes: given where it is used, refused where it is not."""

from pathlib import Path
from typing import Any

import pytest

from matsmerge import RecipeError
from matsmerge.recipes.model_data import ModelData, as_model_data
from matsmerge.recipes.recipe import make_recipe

ALONG = {"name": "mats_cross", "init": "average"}


def recipe(*data: Any, method: Any = "average", **more: Any) -> dict[str, Any]:
    models = [
        {"model": f"m{i}", "name": f"m{i}"} | ({"data": one} if one is not None else {})
        for i, one in enumerate(data)
    ]
    return {"models": models, "method": method, **more}


def problems(data: dict[str, Any]) -> list[str]:
    with pytest.raises(RecipeError) as error:
        make_recipe(data)
    return error.value.problems


def test_data_that_nobody_uses() -> None:
    found = problems(recipe("a.jsonl", None))
    assert found == [
        "the model m0 has data, which only methods with inputs: merged use, such as mats_cross, "
        "and average does not; leave it out, or say match_heads: true / --match-heads"
    ]
    assert len(problems(recipe("a.jsonl", "b.jsonl"))) == 2


def test_data_that_is_lacking() -> None:
    (problem,) = problems(recipe("a.jsonl", None, method=ALONG))
    assert "inputs: merged runs the models on their data, and the model m1 has none" in problem
    (problem,) = problems(recipe("a.jsonl", None, match_heads=True))
    assert problem.startswith("match_heads runs the models on their data, and the model m1 has")
    assert len(problems(recipe(None, None, method=ALONG))) == 2


def test_data_where_it_is_used() -> None:
    for data in (
        recipe("a.jsonl", "b.jsonl", method=ALONG),
        recipe("a.jsonl", "b.jsonl", match_heads=True),
        recipe(None, None),
        recipe(None, None, match_heads=False),
    ):
        make_recipe(data)


def test_heads_are_matched_with_mats_cross_unless_it_is_said_otherwise() -> None:
    data = recipe("a.jsonl", "b.jsonl", method=ALONG)
    assert make_recipe(data).matches_heads
    assert not make_recipe(data | {"match_heads": False}).matches_heads
    assert not make_recipe(recipe(None, None)).matches_heads


def test_a_share_to_stop_by() -> None:
    (first, second) = problems(
        recipe({"path": "a.jsonl", "held_out": 0.2}, {"path": "b", "held_out": 0.1}, method=ALONG)
    )
    assert first == "the model m0: held_out is for solvers with stop: held_out"
    assert second.startswith("the model m1: held_out")


def test_a_trajectory_is_of_one_run() -> None:
    found = problems(recipe("a", "b", method=ALONG, trajectory=[1, 2]))
    assert any("each number of iterations is a merge of its own" in p for p in found), found


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("average", "trajectory: method average has no iterations to write models of"),
        ({"name": "ties"}, "trajectory: method ties has no iterations"),
    ],
)
def test_trajectories_of_what_does_not_iterate(method: Any, message: str) -> None:
    found = problems(recipe(None, None, method=method, base="c", trajectory=[1]))
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a.jsonl", {"path": "a.jsonl"}),
        (Path("a.jsonl"), {"path": "a.jsonl"}),
        ({"path": Path("a"), "seed": 1}, {"path": "a", "seed": 1}),
        ({"path": "a"}, {"path": "a"}),
        (None, None),
    ],
)
def test_a_path_alone_is_data(given: Any, expected: Any) -> None:
    assert as_model_data(given) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "a", "num_examples": -1}, "num_examples: .*greater than or equal to 0"),
        ({"path": "a", "held_out": 1}, "held_out: .*less than 1"),
        ({"path": "a", "batch_size": 0}, "batch_size"),
        ({"path": "a", "max_tokens": 0}, "max_tokens"),
        ({"path": "a", "seed": -1}, "seed"),
        ({"path": "a", "shufle": True}, "unknown key 'shufle'; did you mean 'shuffle'"),
        ({"num_examples": 3}, "path: is required"),
        (3, "models.0.data: expected the path of data, or a mapping with `path`, found int"),
        ([{"text": "a"}], "models.0.data: expected the path of data, .* found list"),
    ],
)
def test_what_is_wrong_with_data(data: Any, message: str) -> None:
    import re

    found = problems(recipe(data, "b.jsonl", method=ALONG))
    assert any(re.search(message, problem) for problem in found), found


def test_data_is_written_as_it_is_given() -> None:
    made = make_recipe(recipe({"path": "a", "num_examples": 5}, "b", method=ALONG))
    again = make_recipe(made.model_dump(mode="json", exclude_defaults=True))
    assert again == made
    data = made.models[0].data
    assert isinstance(data, ModelData)
    assert data.model_dump()["path"] == "a"
    assert data.num_examples == 5


def test_what_is_said_here_counts_more_than_the_task_file(tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text("data: rows.jsonl\ntask: sequence_classification\nseed: 7\n")
    data = ModelData.model_validate({"path": str(task), "seed": 3})
    described = data.task_file
    assert described.task == "sequence_classification"
    assert described.seed == 3
    assert str(described.data).endswith("rows.jsonl")
    plain = ModelData.model_validate({"path": "rows.jsonl", "task": "causal_lm"}).task_file
    assert (plain.data, plain.task) == ("rows.jsonl", "causal_lm")


def test_choices_of_examples() -> None:
    data = ModelData.model_validate({"path": "a", "num_examples": 0, "held_out": 0.25, "seed": 4})
    assert data.choice(data.task_file).num_examples is None  # all
    assert data.statistics_options.held_out == 0.25
    assert data.statistics_options.seed == 4
    assert ModelData.model_validate({"path": "a"}).choice(data.task_file).num_examples == 1000
