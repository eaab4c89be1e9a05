"""Whatever is wrong with the files of a run: an error that names the file, or a report."""

import json
from pathlib import Path
from typing import Any

import pytest
from damaged_files import mutated_texts, refused
from made_up_results import make_merge, make_results

from matsmerge.lab.evaluation.metrics import Score
from matsmerge.lab.evaluation.results import Reading, Results, ScoredTask
from matsmerge.lab.experiments.suite_results import read_results
from matsmerge.lab.reports.markdown import to_markdown
from matsmerge.lab.reports.merge_report import merge_report
from matsmerge.lab.reports.merge_subspaces import find_subspaces
from matsmerge.lab.reports.suite_report import suite_report

RECIPE = {
    "models": [{"model": "/home/someone/a", "name": "first", "weight": 0.5}, {"model": "o/second"}],
    "base": "/home/someone/base/model",
    "method": {"name": "mats", "iterations": 20},
}


def tuning() -> dict[str, Any]:
    trials = [
        {"choice": {"scale": s}, "score": s, "scores": {"rte": s}, "errors": {"rte": 0.1}}
        for s in (0.25, 0.5, 0.75)
    ]
    failed = {"choice": {"scale": 9.0}, "score": None, "scores": {}, "errors": {}, "failure": "no"}
    return {
        "version": "1",
        "options": {"split": "validation", "strategy": "grid"},
        "metrics": {"rte": "accuracy"},
        "best": trials[2],
        "trials": [*trials, failed],
    }


def scores() -> dict[str, Any]:
    task = ScoredTask(
        kind="sequence_classification", metrics={"accuracy": Reading()}, num_examples=100
    )
    names = ("mine", "individual", "other")
    return Results(
        {"rte": task, "cb": task},
        {name: {"path": "x"} for name in names},
        {n: {t: {"accuracy": Score(0.5, 0.02)} for t in ("rte", "cb")} for n in names},
        {"models": {"mine": "/elsewhere"}},
        {"torch": "2"},
        ["a note"],
    ).to_json()


def merge_with_everything() -> dict[str, Any]:
    inputs = [
        {"name": "first", "source": "a", "fingerprint": "1"},
        {"name": "first", "statistics": "b", "fingerprint": "2", "num_examples": {"main": 5}},
        {"name": "first", "data": "c", "fingerprint": "2", "num_examples": 5},
    ]
    lora = {"layer": {"rank": 2, "energy": 0.5}}
    heads = {"first": ["head.weight"]}
    more = {"inputs": inputs, "notes": ["a note"], "lora": lora, "heads": heads}
    return make_merge("mats", RECIPE) | more


@pytest.mark.parametrize("name", ["merge.json", "tuning.json", "results.json"])
def test_files_of_a_merge(name: str, tmp_path: Path) -> None:
    contents = {
        "merge.json": merge_with_everything(),
        "tuning.json": tuning(),
        "results.json": scores(),
    }
    for file, content in contents.items():
        (tmp_path / file).write_text(json.dumps(content))

    def use() -> None:
        find_subspaces(tmp_path)
        to_markdown(merge_report(tmp_path, [tmp_path / "results.json"])).encode()

    use()
    # A third of them: every report that is made draws its figures.
    assert len(refused(tmp_path / name, mutated_texts(contents[name], every=3), use)) > 30


def test_results_of_a_suite(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    content = json.loads(make_results().model_dump_json())

    def use() -> None:
        to_markdown(suite_report(read_results(path))).encode()

    # Some of the thousands that there are, which take minutes.
    some = mutated_texts(content, every=37)
    assert len(refused(path, some, use, names_file=False)) > 50
