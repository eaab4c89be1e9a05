"""Each verdict where it is due, and where it is not."""

from collections.abc import Iterable, Sequence

import pytest
import torch

from matsmerge.advice import verdicts
from matsmerge.advice.advice import Finding
from matsmerge.advice.answers import Answers
from matsmerge.advice.task_vectors import TaskVectors

F64 = torch.float64


def vectors(
    norms: Sequence[float], cosine: float = 0.0, base: float = 1.0, with_base: float = 0.0
) -> TaskVectors:
    """Task vectors of these norms with one cosine between them, and one with the base."""
    num = len(norms)
    angles = torch.full((num + 1, num + 1), cosine, dtype=F64)
    angles[0, :] = angles[:, 0] = with_base
    sizes = torch.tensor([base, *norms], dtype=F64)
    products = (angles.fill_diagonal_(1.0) * sizes[:, None] * sizes).clone()
    names = tuple("abcdef"[:num])
    return TaskVectors(names, {"w": products}, frozenset(["w"]))


def levels(found: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(one.subject, one.level) for one in found]


def answers(variety: float, **given: object) -> Answers:
    values: dict[str, object] = {
        "num_examples": 300,
        "num_classes": 2,
        "confidence": 0.7,
        "variety": variety,
        "commonest_share": 0.9,
        "writes_text": False,
    }
    return Answers(**values | given)  # type: ignore[arg-type]


def test_models_near_the_base_are_good() -> None:
    (found,) = verdicts.judge_origin(vectors([0.02, 0.03]))
    assert found.level == "good"
    assert "2.0% to 3.0%" in found.text


def test_models_that_moved_far() -> None:
    (found,) = verdicts.judge_origin(vectors([0.02, 0.1]))
    assert (found.subject, found.level, found.models) == ("distance", "warning", ("b",))


def test_another_base() -> None:
    (found,) = verdicts.judge_origin(vectors([0.02, 2.0]))  # cosine 1 / sqrt(5)
    assert (found.subject, found.level, found.models) == ("base", "warning", ("b",))
    assert "Check --base" in found.text


def test_the_base_among_the_models() -> None:
    (found,) = verdicts.judge_origin(vectors([0.02, 0.0]))
    assert found.models == ("b",)
    assert "leave it out" in found.text


def test_a_model_next_to_the_base_among_the_models() -> None:
    near = vectors([0.02, 1e-6])
    assert verdicts.unmoved(near) == ("b",)
    (found,) = verdicts.judge_origin(near)
    assert (found.level, found.models) == ("warning", ("b",))
    assert verdicts.large_norms(near, ["b"]) == {}
    assert not list(verdicts.judge_norms(near, {}, ["b"]))
    assert verdicts.unmoved(vectors([0.02, 0.0019])) == ()
    assert verdicts.unmoved(vectors([1e-6, 2e-6])) == ()  # both moved as little


def test_only_those_that_moved_far_are_spoken_of() -> None:
    (found,) = verdicts.judge_origin(vectors([0.02, 0.15]))
    assert found.models == ("b",)
    assert "by 15.0% of its norm" in found.text


def test_norms_do_not_hide_another_base() -> None:
    matrices = vectors([0.02, 2.0])
    scales = torch.zeros(3, 3, dtype=F64)
    scales[0, 0] = 1000.0  # the same in all
    everything = TaskVectors(matrices.models, {**matrices.products, "norm": scales}, frozenset("w"))
    (found,) = verdicts.judge_origin(everything)
    assert (found.subject, found.models) == ("base", ("b",))


def test_long_task_vectors() -> None:
    even = vectors([1, 2, 2.9])
    assert not verdicts.large_norms(even)
    assert levels(verdicts.judge_norms(even, {})) == [("norms", "good")]
    uneven = vectors([1, 1, 1, 4])
    large = verdicts.large_norms(uneven)
    assert large == {"d": pytest.approx(4.0)}
    (found,) = verdicts.judge_norms(uneven, large)
    assert (found.level, found.models) == ("warning", ("d",))
    assert verdicts.large_norms(vectors([1, 4])) == {"b": pytest.approx(4.0)}
    assert verdicts.large_norms(vectors([0, 4])) == {}
    assert verdicts.large_norms(vectors([1, 4]), ["a"]) == {}
    assert verdicts.large_norms(vectors([1, 1, 4, 5]), ["d"]) == {"c": pytest.approx(4.0)}


def test_directions() -> None:
    assert levels(verdicts.judge_directions(vectors([1, 1], 0.2))) == [("directions", "good")]
    (same,) = verdicts.judge_directions(vectors([1, 1], 0.99))
    assert "nearly the same model" in same.text
    (opposite,) = verdicts.judge_directions(vectors([1, 1], -0.3))
    assert "undo each other" in opposite.text
    assert {same.level, opposite.level} == {"warning"}


def test_confidence_by_statistics() -> None:
    assert levels(verdicts.judge_fisher({"a": 1.0, "b": 5.0})) == [("confidence", "good")]
    (found,) = verdicts.judge_fisher({"a": 1.0, "b": 50.0, "c": 5.0})
    assert (found.level, found.models) == ("note", ("a", "b"))
    assert "50 times less" in found.text
    assert not list(verdicts.judge_fisher({}))


def test_poor_models() -> None:
    assert verdicts.is_poor(answers(0.05))
    assert not verdicts.is_poor(answers(0.3))
    assert not verdicts.is_poor(answers(0.05, writes_text=True))
    (found,) = verdicts.judge_answers({"a": answers(0.05), "b": answers(0.5)})
    assert (found.level, found.models) == ("warning", ("a",))
    (found,) = verdicts.judge_answers({"a": answers(0.4), "b": answers(0.5)})
    assert found.level == "good"
    assert not list(verdicts.judge_answers({}))


def test_text_that_is_not_judged_is_not_praised() -> None:
    writes = answers(0.0, writes_text=True, confidence=0.01)
    assert not list(verdicts.judge_answers({"a": writes, "b": writes}))
    (found,) = verdicts.judge_answers({"a": writes, "b": answers(0.5)})
    assert found.text.startswith("Every classifier tells")
    assert "70.0%" in found.text
    assert "1.0%" not in found.text


def test_labels_say_what_a_model_could_know() -> None:
    # Nearly all data has one label: more cannot be said of it.
    rare = {"accuracy": 0.99, "majority": 0.95, "label_variety": 0.29}
    assert not verdicts.is_poor(answers(0.05, **rare))
    # Answers vary, and are no better than always the same one: 2 errors of 0.65 are 0.055.
    wrong = {"majority": 0.65, "label_variety": 0.93}
    assert verdicts.is_poor(answers(0.5, accuracy=0.70, **wrong))
    assert not verdicts.is_poor(answers(0.5, accuracy=0.71, **wrong))
    (found,) = verdicts.judge_answers({"a": answers(0.05, accuracy=0.66, **wrong)})
    assert "right on 66%" in found.text
