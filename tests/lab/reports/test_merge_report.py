"""Reports of merges and of what was tuned, made by the commands themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_results import make_merge
from safetensors.torch import save_file

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.errors import DataError
from matsmerge.lab.evaluation.metrics import Score
from matsmerge.lab.evaluation.results import Reading, Results, ScoredTask
from matsmerge.lab.reports.document import Report, Table
from matsmerge.lab.reports.markdown import to_markdown
from matsmerge.lab.reports.merge_report import merge_report
from matsmerge.lab.reports.page import to_page

RECIPE = {
    "models": [{"model": "/home/someone/a", "name": "first"}, {"model": "owner/second"}],
    "base": "/home/someone/base/model",
    "method": {"name": "mats", "iterations": 20},
}
TASK = ScoredTask(kind="sequence_classification", metrics={"accuracy": Reading()}, num_examples=100)
LOSS = ScoredTask(
    kind="causal_lm",
    metrics={"perplexity": Reading(higher_is_better=False, in_percent=False)},
    num_examples=100,
)


def write_merge(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    (folder / "merge.json").write_text(json.dumps(make_merge("mats", RECIPE) | changes))
    return folder


def write_scores(
    folder: Path, merged: Path, scores: dict[str, list[float]], tasks: list[str], task: ScoredTask
) -> Path:
    metric = task.metric
    results = Results(
        dict.fromkeys(tasks, task),
        {
            n: {"fingerprint": fingerprint(open_checkpoint(merged))} if n == "mine" else {}
            for n in scores
        },
        {
            name: {t: {metric: Score(v, 0.02)} for t, v in zip(tasks, values, strict=True)}
            for name, values in scores.items()
        },
    )
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results.to_json()))
    return folder


def tables(report: Report, section: str) -> list[Table]:
    blocks = next(s.blocks for s in report.shown if s.title == section)
    return [block for block in blocks if isinstance(block, Table)]


def test_a_merge_alone(tmp_path: Path) -> None:
    report = merge_report(write_merge(tmp_path / "merged"))
    assert report.title == "2 models merged by mats"
    assert report.about == (
        "first, owner/second: each fine-tuned from base, now one model, merged by mats "
        "(iterations 20)."
    )
    assert [s.title for s in report.shown] == [
        "What was merged", "Convergence of layers", "Recipe", "Provenance", "Parameters that were not solved",
    ]  # fmt: skip
    left = tables(report, "Parameters that were not solved")[0]
    assert left.title == "mats: 1 tensor of 25, 0.5% of all parameters, averaged"
    assert left.rows == [["norm.weight", "1", "8", "0.52%"]]
    (said,) = report.verdicts
    assert said.headline == "2 models merged by mats"
    assert said.evidence.startswith(
        "25 tensors, of which 24 by solving a linear system. Not scored"
    )
    assert said.code is not None
    assert 'matsmerge.load("merged")' in said.code.text
    assert "<h1>2 models merged by mats</h1>" in to_page(report)


def test_what_is_published_has_no_local_paths(tmp_path: Path) -> None:
    report = merge_report(write_merge(tmp_path / "merged"))
    assert "/home" not in to_page(report)
    markdown = to_markdown(report)
    assert "/home" not in markdown
    assert "- model: owner/second" in markdown


def test_scores_of_the_merge_and_others(tmp_path: Path) -> None:
    merged = write_merge(tmp_path / "merged")
    rows = {"mine": [0.7, 0.9], "average": [0.6, 0.6], "individual": [0.9, 0.9]}
    scores = write_scores(tmp_path / "scores", merged, rows, ["x", "y"], TASK)
    more = write_scores(tmp_path / "more", merged, {"ties": [0.5, 0.8]}, ["x", "y"], TASK)
    report = merge_report(merged, [scores, more])
    table = tables(report, "Scores")[0]
    assert [row[0] for row in table.rows] == ["mine", "ties", "average", "individual"]
    assert table.marked == {0}
    (said,) = report.verdicts
    assert said.headline.startswith("mine: 80.0, 10.0 points worse than two models at half")
    assert "−10.0 against each task's own model (95\u00a0% interval" in said.evidence
    assert "It closes 67\u00a0% of the gap" in said.evidence
    assert "The next is ties with 65.0." in said.evidence
    other = write_scores(tmp_path / "other", merged, {"mine": [0.5]}, ["z"], TASK)
    assert tables(merge_report(merged, [scores, other]), "Scores")[0].heads[-1] == "z"


def test_the_same_model_twice_is_refused(tmp_path: Path) -> None:
    merged = write_merge(tmp_path / "merged")
    first = write_scores(tmp_path / "1", merged, {"mine": [0.7]}, ["x"], TASK)
    second = write_scores(tmp_path / "2", merged, {"mine": [0.8]}, ["x"], TASK)
    with pytest.raises(DataError, match="'mine' is among other scores too"):
        merge_report(merged, [first, second])


def test_of_losses_the_lowest_is_best(tmp_path: Path) -> None:
    merged = write_merge(tmp_path / "merged")
    rows = {"mine": [9.0, 8.0], "average": [12.0, 15.0], "individual": [7.0, 6.0]}
    scores = write_scores(tmp_path / "scores", merged, rows, ["x", "y"], LOSS)
    report = merge_report(merged, [scores])
    assert tables(report, "Scores")[0].rows[0][0] == "mine"
    (said,) = report.verdicts
    assert "It closes 71\u00a0% of the gap" in said.evidence
    assert said.headline.startswith("mine: 8.500, 2.000 worse than two models")
    assert said.figure is not None
    assert said.figure.chart.y.names == ["mine", "average", "individual"]
    assert "percent" not in to_markdown(report)


def test_what_was_tried(tmp_path: Path) -> None:
    folder = write_merge(tmp_path / "tuned")
    trials = [
        {"choice": {"scale": s}, "score": v, "scores": {"x": v}, "errors": {"x": 0.1}}
        for s, v in [(0.1, 0.5), (0.2, 0.8), (0.3, 0.7)]
    ]
    failed = {"choice": {"scale": 9}, "score": None, "scores": {}, "errors": {}, "failure": "Inf"}
    content = {"options": {"split": "validation"}, "best": trials[1], "trials": [*trials, failed]}
    (folder / "tuning.json").write_text(json.dumps(content))
    report = merge_report(folder)
    table = tables(report, "What was tried")[0]
    assert [str(row[0]) for row in table.rows] == ["scale = 0.2", "scale = 0.3", "scale = 0.1"]
    assert "scale = 0.2 has the best mean score on validation data." in to_page(report)
    assert "Inf" in to_page(report)


def test_stages_are_told_apart(tmp_path: Path) -> None:
    merge = make_merge("mats", RECIPE)
    for about in merge["parameters"].values():
        about["solved"] = [{**one, "stage": s} for one in about.get("solved", ()) for s in (0, 1)]
    page = to_page(merge_report(write_merge(tmp_path / "merged", **merge)))
    assert "<option>mats, stage 1</option><option>mats, stage 2</option>" in page


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recipe": {"models": [3]}, "parameters": {}}'])
def test_a_damaged_merge_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "merge.json").write_text(text)
    with pytest.raises(DataError, match=r"merge\.json: "):
        merge_report(tmp_path)
