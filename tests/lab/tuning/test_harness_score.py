"""`mats tune --lm-eval`: what scores best on a task of lm-evaluation-harness is chosen."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from stand_in_harness import Task, accuracy, install, letter_tokenizer, write_task
from tiny_models import llama_config, save
from transformers import LlamaForCausalLM

import matsmerge.lab
from matsmerge.errors import DataError, RecipeError
from matsmerge.lab.evaluation.task_evaluation import EvaluationSettings
from matsmerge.lab.tuning.harness_score import HarnessTasks
from matsmerge.lab.tuning.search import Tuned

Run = Callable[..., tuple[int, str, str]]
WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    save(LlamaForCausalLM(llama_config()), tmp_path / "base", letter_tokenizer())
    for seed, name in enumerate(("one", "two"), 1):
        model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
        save(model, tmp_path / name, letter_tokenizer(), seed=seed)
    content = {
        "models": [str(tmp_path / name) for name in ("one", "two")],
        "base": str(tmp_path / "base"),
        "method": "task_arithmetic",
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What each evaluation saw. The stand-in scores by how far a weight is from the base's."""
    seen: list[list[str]] = []

    def simple_evaluate(tasks: list[Task], model_args: dict[str, str], **_: Any) -> Any:
        seen.append([text for task in tasks for text in task.eval_docs])
        ours, base = (
            load_file(Path(folder) / "model.safetensors")[WEIGHT]
            for folder in (model_args["pretrained"], tmp_path / "base")
        )
        share = float(torch.tanh(torch.dist(ours, base)))
        scores = {"acc,none": share, "acc_norm,none": 1 - share, "ppl,none": share}
        return {"results": {task.name: scores for task in tasks}}

    tasks = {
        "both": Task("both", ["v"], ["t"]),
        "only_test": Task("only_test", [], ["t"]),
        "fixed": Task("fixed", ["v"], ["t"], is_fixed=True),
        "text": Task("text", ["v"], metrics={"ppl": False}),
    }
    install(monkeypatch, simple_evaluate, tasks)
    return seen


@pytest.mark.parametrize(("asked", "best"), [("both", 1.0), ("both:acc_norm", 0.0), ("text", 0.0)])
def test_the_best_by_a_metric(
    recipe: Path, documents: list[list[str]], mats: Run, tmp_path: Path, asked: str, best: float
) -> None:
    """Higher or lower as the harness says, on validation documents alone."""
    out = tmp_path / "best"
    code, printed, error = mats("tune", recipe, "--lm-eval", asked, "--search", "scale=0,0.5,1",
                                "--out", out, "--json")  # fmt: skip
    assert code == 0, error
    assert json.loads(printed)["choice"] == {"scale": best}
    assert documents == [["v"]] * 3
    report = json.loads((out / "tuning.json").read_text())
    assert report["metrics"] == {asked.partition(":")[0]: asked.partition(":")[2] or ("ppl" if asked == "text" else "acc")}  # fmt: skip


def test_test_documents_only_if_asked_for(
    recipe: Path, documents: list[list[str]], tmp_path: Path
) -> None:
    def tune(*tasks: str, **options: Any) -> Tuned:
        return matsmerge.lab.tune(
            recipe, out=tmp_path / "best", search={"scale": "0,1"}, lm_eval=tasks, **options
        )

    with pytest.raises(DataError, match="only_test: has no validation documents; --split test"):
        tune("only_test")
    with pytest.raises(DataError, match="fixed: its Python class always scores test documents"):
        tune("fixed")
    with pytest.raises(DataError, match="both: has no metric 'f1', but acc, acc_norm"):
        tune("both:f1")
    with pytest.raises(DataError, match="have no mean to tune by: both acc, text ppl"):
        tune("both", "text")
    with pytest.raises(DataError, match="scored by their labels; leave out --unlabelled"):
        tune("both", unlabelled=True)
    with pytest.raises(DataError, match="no split 'train'"):
        tune("both", split="train")
    with pytest.raises(RecipeError, match="unknown key 'num_exmaples'; did you mean"):
        tune("both", num_exmaples=3)
    assert documents == []
    assert tune("only_test", split="test").best.choice == {"scale": 1}
    assert documents == [["t"]] * 2


def test_in_a_file(recipe: Path, documents: list[list[str]], mats: Run, tmp_path: Path) -> None:
    """A file of a search names tasks, too; a YAML file beside it is found from anywhere."""
    path = tmp_path / "tune.yaml"
    content = {"recipe": "recipe.yaml", "search": {"scale": [0, 1]}, "lm_eval": ["both"]}
    path.write_text(yaml.safe_dump(content))
    assert matsmerge.lab.tune(path, out=tmp_path / "best").metrics == {"both": "acc"}
    path.write_text(yaml.safe_dump(content | {"lm_eval": ["here.yaml:acc"]}))
    code, _, error = mats("tune", path, "--out", tmp_path / "other")
    assert code == 1
    assert f"{tmp_path / 'here.yaml'}: no such file" in " ".join(error.split())


def test_what_another_process_gets(documents: list[list[str]]) -> None:
    """Names and settings; it loads the tasks itself."""
    tasks = HarnessTasks(["both"], "validation", EvaluationSettings(num_examples=3))
    before = tasks.identity
    copy = pickle.loads(pickle.dumps(tasks))
    assert copy == tasks
    assert vars(copy) == {"asked": ["both"], "split": "validation", "settings": tasks.settings}
    assert copy.identity == before
    assert HarnessTasks(["both:acc_norm"]).identity != before


@pytest.mark.filterwarnings("ignore")  # of a library that is not ours
def test_for_real(recipe: Path, mats: Run, tmp_path: Path) -> None:
    """The score of every trial is what the harness says of the merge; test rows stay unseen."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    task = write_task(tmp_path, "validation", "test")
    out = tmp_path / "best"
    code, printed, error = mats("tune", recipe, "--lm-eval", task, "--search", "scale=0:1:0.5",
                                "--out", out, "--json")  # fmt: skip
    assert code == 0, error
    assert "Running" not in error  # the harness's own bars
    report = json.loads((out / "tuning.json").read_text())
    found = [trial["score"] for trial in report["trials"]]
    assert report["best"]["score"] == max(found) > min(found)
    model = LlamaForCausalLM.from_pretrained(out / "model")
    assert accuracy(model, tmp_path / "validation.jsonl") == pytest.approx(max(found))
    code, printed, error = mats("evaluate", out / "model", "--lm-eval", task, "--json")
    assert code == 0, error
    on_test = json.loads(printed)["scores"]["model"]["letters"]["acc"]["value"]
    assert accuracy(model, tmp_path / "test.jsonl") == pytest.approx(on_test)
