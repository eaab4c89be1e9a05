"""Many models on many tasks, from Python."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import bert_config, make_tokenizer, save, t5_config, write_rows
from transformers import BertForSequenceClassification, T5ForConditionalGeneration

from matsmerge.errors import DataError
from matsmerge.lab.evaluation import comparison
from matsmerge.lab.evaluation.comparison import evaluate
from matsmerge.lab.evaluation.contestants import name_models, parse_named
from matsmerge.lab.evaluation.task_evaluation import encode_task
from matsmerge.lab.evaluation.task_evaluation import evaluate_task as evaluate_one
from matsmerge.models.pretrained import load_pretrained
from matsmerge.tasks import loaded_model
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task_file import TaskFile, read_task_file

SENTENCES = ["a b c", "d", "e f g h", "b a", "c c d a e", "k l", "n a o p b c d", "m"] * 3


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three classifiers, and two tasks with splits."""
    torch.manual_seed(0)
    for seed, name in enumerate("abc"):
        model = BertForSequenceClassification(bert_config(num_labels=2))
        save(model, tmp_path / name, make_tokenizer(), seed=seed)
    for name, every in (("one", 2), ("two", 3)):
        rows = [{"text": t, "label": int(i % every == 0)} for i, t in enumerate(SENTENCES)]
        write_rows(tmp_path / f"{name}.jsonl", rows)
        (tmp_path / f"{name}.yaml").write_text(
            f"task: sequence_classification\ndata: {name}.jsonl\n"
            "splits: {train: 0.5, test: 0.5}\nmetrics: [accuracy, loss]\n"
        )
    return tmp_path


def test_every_model_on_every_task(place: Path) -> None:
    tasks = [place / "one.yaml", place / "two.yaml"]
    found = evaluate(
        [place / "a", place / "b"], tasks, individual={"one": place / "a", "two": place / "c"},
        ensemble=True,
    )  # fmt: skip
    assert list(found.scores) == ["a", "b", "ensemble", "individual"]
    for task in tasks:
        file = read_task_file(task)
        name = str(file.name)
        data = read_split(file, "test")
        alone = {
            model: evaluate_one(loaded, data, file)
            for model in "abc"
            for loaded in [load_model(place / model, TaskFile(task=file.task))]
        }
        for model in "ab":
            assert found.scores[model][name] == alone[model].scores(["accuracy", "loss"])
        own = {"one": "a", "two": "c"}[name]
        assert found.scores["individual"][name] == alone[own].scores(["accuracy", "loss"])
        for answer, a, b in zip(
            found.outcomes["ensemble"][name].answers, alone["a"].answers, alone["b"].answers,
            strict=True,
        ):  # fmt: skip
            assert a.probabilities is not None
            assert b.probabilities is not None
            mean = (a.probabilities.astype(np.float64) + b.probabilities) / 2
            np.testing.assert_allclose(answer.probabilities, mean, rtol=1e-6)  # type: ignore[arg-type]
            assert answer.prediction == mean.argmax()
        assert found.tasks[name].num_examples == 12
        assert found.tasks[name].split == "test"
        assert found.tasks[name].data == f"{name}.jsonl"
    ratios = []
    for name in ("one", "two"):
        mine, individual = found.score("b", name), found.score("individual", name)
        assert mine is not None
        assert individual is not None
        ratios.append(mine.value / individual.value)
    assert found.normalised("b") == pytest.approx(np.mean(ratios))
    # The model that is also a row of its own is not described twice.
    assert found.models["individual"]["one"] == {"row": "a"}
    assert found.models["individual"]["two"]["source"] == "c"


def test_twice_the_same(place: Path) -> None:
    tasks = [place / "one.yaml", place / "two.yaml"]
    runs = [evaluate([place / "a", place / "b"], tasks, ensemble=True) for _ in range(2)]
    texts = [json.dumps(run.to_json(), allow_nan=False) for run in runs]
    assert texts[0] == texts[1]
    lines = [
        [
            list(outcome.to_lines())
            for by_task in run.outcomes.values()
            for outcome in by_task.values()
        ]
        for run in runs
    ]
    assert lines[0] == lines[1]
    small = evaluate([place / "a"], tasks, batch_size=1)
    for name in ("one", "two"):
        mine, other = small.scores["a"][name], runs[0].scores["a"][name]
        assert mine["accuracy"] == other["accuracy"]
        assert mine["loss"].value == pytest.approx(other["loss"].value, rel=1e-5)


def test_names_and_splits(place: Path) -> None:
    file = read_task_file(place / "one.yaml")
    found = evaluate({"x": place / "a"}, [file], "train", num_examples=5)
    assert list(found.scores) == ["x"]
    assert (found.tasks["one"].split, found.tasks["one"].num_examples) == ("train", 5)
    assert found.models["x"]["source"] == "a"
    whole = file.model_copy(update={"splits": None})
    found = evaluate([place / "a"], [whole])
    assert found.tasks["one"].num_examples == 24
    assert found.notes == ["one: has one file and no splits; all its rows are used"]


def test_a_sorted_file_is_noticed(place: Path) -> None:
    rows = [{"text": t, "label": i // 12} for i, t in enumerate(SENTENCES)]
    write_rows(place / "sorted.jsonl", rows)
    file = TaskFile(name="x", data=str(place / "sorted.jsonl"))
    assert "none of 1 of the 2 labels" in evaluate([place / "a"], [file], num_examples=12).notes[-1]
    assert len(evaluate([place / "a"], [file], num_examples=13).notes) == 1


def test_models_that_are_built_alike_are_encoded_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[Any] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        encoded.append(arguments)
        return encode_task(*arguments, **options)

    monkeypatch.setattr(comparison, "encode_task", counted)
    evaluate([place / "a", place / "b", place / "c"], [place / "one.yaml"])
    assert len(encoded) == 1
    save(BertForSequenceClassification(bert_config(num_labels=3)), place / "d", make_tokenizer())
    evaluate([place / "a", place / "d"], [place / "one.yaml"])
    assert len(encoded) == 3


def test_adapters_share_their_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save(T5ForConditionalGeneration(t5_config()), tmp_path / "base", make_tokenizer())
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        config = LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q", "v"], r=2)
        model = get_peft_model(T5ForConditionalGeneration.from_pretrained(base), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape))
        model.save_pretrained(tmp_path / name)
    rows = [{"input": t, "choices": ["a", "b c"], "label": i % 2} for i, t in enumerate(SENTENCES)]
    write_rows(tmp_path / "d.jsonl", rows)
    tasks = []
    for name in ("one", "two"):
        tasks.append(TaskFile(name=name, task="multiple_choice", data=str(tmp_path / "d.jsonl"), length_normalize=name == "two"))  # fmt: skip
    loads: list[Any] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        loads.append(arguments)
        return load_pretrained(*arguments, **options)

    monkeypatch.setattr(loaded_model, "load_pretrained", counted)
    found = evaluate([tmp_path / "a", tmp_path / "b"], tasks)
    assert len(loads) == 1
    for model in "ab":
        for task in tasks:
            loaded = load_model(tmp_path / model, task)
            data = read_split(task)
            alone = evaluate_one(loaded, data, task)
            mine = found.outcomes[model][str(task.name)]
            assert mine.losses().tolist() == pytest.approx(alone.losses().tolist(), rel=1e-5)
    assert found.models["a"]["base"] == found.models["b"]["base"]
    assert found.models["a"]["fingerprint"] != found.models["b"]["fingerprint"]


def test_everything_that_is_wrong_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was run")

    monkeypatch.setattr(comparison, "answer_examples", never)
    (place / "bad.yaml").write_text("data: one.jsonl\nmetrics: [acuracy]\n")
    (place / "gone.yaml").write_text("data: {train: one.jsonl}\n")
    with pytest.raises(DataError) as caught:
        evaluate([place / "a", place / "none"], [place / "bad.yaml", place / "gone.yaml"])
    assert len(caught.value.problems) == 3
    for part in (
        "no metric 'acuracy'",
        "has no split 'test', only train",
        "none: no such",
    ):
        assert part in str(caught.value)
    # What is wrong with the last model alone is also found first.
    save(BertForSequenceClassification(bert_config(num_labels=2)), place / "last", make_tokenizer())
    (place / "last" / "heads").mkdir()
    with pytest.raises(DataError, match="last: has no head for the task 'one'"):
        evaluate([place / "a", place / "last"], [place / "one.yaml"])
    (place / "last" / "tokenizer.json").unlink()
    (place / "last" / "heads").rmdir()
    with pytest.raises(DataError, match="last: has no tokenizer"):
        evaluate([place / "a", place / "last"], [place / "one.yaml"])


def test_wrong_arguments(place: Path) -> None:
    one = place / "one.yaml"
    for arguments, message in (
        (([place / "a"], []), "give at least one task"),
        (([], [one]), "give at least one model"),
        (([place / "a"], [one, one]), "two tasks are named 'one'"),
        (([place / "a", place / "a"], [one]), "the model is given twice"),
        (({"individual": place / "a"}, [one]), "may not be named 'individual'"),
        (([place / "a"], [one], None, {"on": place / "a"}), "there is no task 'on'; did you mean 'one'"),
        (([place / "a"], [one], None, None, True), "an ensemble needs at least two models"),
        (([place / "a"], [one], "dev"), "has no split 'dev', only train, test"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            evaluate(*arguments)


def test_one_model_and_one_task_need_no_lists(place: Path) -> None:
    found, listed = (
        evaluate(place / "a", place / "one.yaml"),
        evaluate([place / "a"], [place / "one.yaml"]),
    )
    assert found.scores == listed.scores
    assert list(found.scores) == ["a"]


def test_names() -> None:
    assert name_models(["x/merged", "y/merged"]) == {"x-merged": "x/merged", "y-merged": "y/merged"}
    assert parse_named(["x/m", "best=y/m", "owner/z@main"]) == {
        "m": "x/m",
        "best": "y/m",
        "z-main": "owner/z@main",
    }
    for wrong in (["x/m", "m=y"], ["a=x", "a=y"]):
        with pytest.raises(DataError, match="two models are named"):
            parse_named(wrong)
    with pytest.raises(DataError, match="may not be named 'a b'"):
        parse_named(["a b=x"])
    with pytest.raises(DataError, match="models of one name"):
        name_models(["x/m", "x//m"])
