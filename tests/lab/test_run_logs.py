"""Logs of searches and suites: what each library is told, and that it comes to hand when asked."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from tiny_models import bert_config, make_tokenizer, save, write_rows
from tiny_suite import make_base, make_data, tiny_suite
from transformers import BertForSequenceClassification

from matsmerge.errors import DataError
from matsmerge.lab.experiments.suite_run import run_suite
from matsmerge.lab.run_logs import NoLog, TensorBoardLog, WandbLog, open_log

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in that notes what it is told."""
    told = SimpleNamespace(started=[], lines=[], finished=0)

    def finish() -> None:
        told.finished += 1

    def init(**options: Any) -> SimpleNamespace:
        told.started.append(options)
        return SimpleNamespace(log=told.lines.append, finish=finish)

    library: Any = ModuleType("wandb")
    library.init = init
    library.Table = lambda columns, data: (columns, data)
    monkeypatch.setitem(sys.modules, "wandb", library)
    return told


def test_weights_and_biases(wandb: SimpleNamespace) -> None:
    log = open_log("wandb:merges")
    assert isinstance(log, WandbLog)
    log.trial({"scale": 0.5, "stages": [1, 2]}, {"sst2": 0.25, "mean": 0.25})
    log.seconds("merge", 1.5)
    log.table("trials", ("tried", "mean"), [("scale=0.5", 0.25)])
    log.close()
    assert wandb.started == [{"project": "merges", "job_type": "matsmerge"}]
    assert wandb.lines == [
        {"setting/scale": 0.5, "setting/stages": "[1, 2]", "score/sst2": 0.25, "score/mean": 0.25},
        {"seconds/merge": 1.5},
        {"trials": (["tried", "mean"], [["scale=0.5", "0.25"]])},
    ]
    assert wandb.finished == 1


def events(folder: Path) -> Any:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(folder))
    found.Reload()
    return found


@pytest.mark.filterwarnings("ignore")  # of a library that is not ours
def test_tensorboard(tmp_path: Path) -> None:
    """Event files are read back with the library that shows them."""
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    log = open_log(f"tensorboard:{tmp_path / 'log'}")
    assert isinstance(log, TensorBoardLog)
    log.trial({"scale": 0.5, "trim": "global", "stages": [1]}, {"mean": 0.25})
    log.trial({"scale": 1.0, "trim": "global", "stages": [2]}, {"mean": math.nan})
    for seconds in (1.5, 2.5):
        log.seconds("merge", seconds)
    log.table("trials", ("tried", "a|b"), [("scale=0.5", 0.25)])
    log.close()
    found = events(tmp_path / "log")
    scores = [(event.step, event.value) for event in found.Scalars("score/mean")]
    assert scores[0] == (0, 0.25)
    assert scores[1][0] == 1
    assert math.isnan(scores[1][1])
    assert [(e.step, e.value) for e in found.Scalars("seconds/merge")] == [(0, 1.5), (1, 2.5)]
    (text,) = found.Tensors("trials/text_summary")
    assert b"a\\|b" in text.tensor_proto.string_val[0]
    assert b"scale=0.5" in text.tensor_proto.string_val[0]
    first = events(tmp_path / "log" / "trial-0")
    assert first.Scalars("score/mean")[0].value == 0.25
    assert any("hparams" in tag for tag in first.summary_metadata)


@pytest.mark.parametrize("asked", ["tensorboard", "tensorboard:", "comet:x", ""])
def test_what_is_no_log(asked: str) -> None:
    with pytest.raises(DataError, match="expected tensorboard:FOLDER or wandb:PROJECT"):
        open_log(asked)


@pytest.mark.parametrize("library", ["tensorboard", "wandb"])
def test_a_library_that_is_not_installed(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=rf"needs {library}.*pip install 'matsmerge\[{library}\]'"):
        open_log(f"{library}:place")
    assert isinstance(open_log(None), NoLog)


def test_a_search_is_logged(tmp_path: Path, mats: Run, wandb: SimpleNamespace) -> None:
    """Every trial with its seconds, then the table; a wrong name is said before the work."""
    rows = [{"text": text, "label": i % 2} for i, text in enumerate("abcdefgh")]
    write_rows(tmp_path / "one.jsonl", rows)
    (tmp_path / "one.yaml").write_text("data: one.jsonl\nsplits: {validation: 8}\n")
    for seed, name in enumerate(("base", "one", "two")):
        model = BertForSequenceClassification(bert_config(num_labels=2))
        save(model, tmp_path / name, make_tokenizer(), seed)
    models = [str(tmp_path / name) for name in ("one", "two")]
    recipe = {"models": models, "base": str(tmp_path / "base"), "method": "task_arithmetic"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ["tune", tmp_path / "recipe.yaml", "--task", tmp_path / "one.yaml", "--search", "scale=0,1"]  # fmt: skip
    code, _, error = mats(*arguments, "--out", tmp_path / "best", "--log-to", "wandb:p")
    assert code == 0, error
    trials = [line for line in wandb.lines if "setting/scale" in line]
    assert [line["setting/scale"] for line in trials] == [0, 1]
    assert all({"score/one", "score/mean"} < line.keys() for line in trials)
    assert sum("seconds/trial" in line for line in wandb.lines) == 2
    heads, table = wandb.lines[-1]["trials"]
    assert heads == ["tried", "one", "mean"]
    assert ["0" in row[0] for row in table] == [True, False]
    assert wandb.finished == 1
    code, _, error = mats(*arguments, "--out", tmp_path / "other", "--log-to", "nowhere")
    assert code == 1
    assert "--log-to 'nowhere'" in error
    assert not (tmp_path / "other").exists()


def test_a_suite_is_logged(tmp_path: Path, wandb: SimpleNamespace) -> None:
    """Every step's seconds, then the scores of every method, and the tables."""
    base, data = make_base(tmp_path / "base"), make_data(tmp_path / "data")
    suite = tiny_suite(methods={"average": {"method": "average"}})
    results = run_suite(suite, tmp_path / "run", base=base, data=data, num_workers=1, log_to="wandb:p")  # fmt: skip
    kinds = [key for line in wandb.lines for key in line if key.startswith("seconds/")]
    assert sorted(kinds) == sorted(f"seconds/{step.kind}" for step in results.steps)
    trials = [line for line in wandb.lines if "setting/method" in line]
    assert len(trials) == len(results.variants["full"].comparison)
    assert trials[0]["setting/variant"] == "full"
    assert {"score/has_a", "score/early", "score/mean"} < trials[0].keys()
    heads, rows = wandb.lines[-1]["steps"]
    assert heads == ["step", "seconds"]
    assert [row[0] for row in rows] == [step.name for step in results.steps]
    assert wandb.finished == 1
