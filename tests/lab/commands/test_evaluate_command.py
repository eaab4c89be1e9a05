"""`mats evaluate`: what it shows and writes, and what it says when something is wrong."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stand_in_harness import install
from tiny_models import bert_config, llama_config, make_tokenizer, save, write_rows
from transformers import BertForSequenceClassification, BertModel, LlamaForCausalLM

from matsmerge.lab.evaluation.results import Results

Run = Callable[..., tuple[int, str, str]]

SENTENCES = ["a b c", "d", "e f g h", "b a", "c c d a e", "k l", "n a o p b c d", "m"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A merge with two heads, the models it may be of, and two tasks."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    merged = save(BertModel(bert_config()), tmp_path / "merged", tokenizer)
    (merged / "heads").mkdir()
    for name, num in (("sst2", 2), ("mnli", 3)):
        model = BertForSequenceClassification(bert_config(num_labels=num))
        save(model, tmp_path / "tuned" / name, tokenizer, seed=num)
        head = {k: v.contiguous() for k, v in model.state_dict().items() if k.startswith("class")}
        save_file(head, merged / "heads" / f"{name}.safetensors")
        rows = [{"s": t, "label": i % num} for i, t in enumerate(SENTENCES)]
        write_rows(tmp_path / f"{name}.jsonl", rows)
        (tmp_path / f"{name}.yaml").write_text(
            f"task: sequence_classification\ndata: {{test: {name}.jsonl}}\ncolumns: {{text: s}}\n"
        )
    return tmp_path


def tasks(place: Path) -> list[object]:
    return ["--task", place / "sst2.yaml", "--task", place / "mnli.yaml"]


def test_a_merge_beside_its_models(mats: Run, place: Path) -> None:
    trained = [f"--individual={n}={place / 'tuned' / n}" for n in ("sst2", "mnli")]
    out = place / "out"
    code, printed, err = mats("evaluate", place / "merged", *tasks(place), *trained, "--out", out)
    assert code == 0, err
    lines = printed.splitlines()
    assert lines[0].strip() == "accuracy in percent ± standard error"
    assert lines[1].split() == ["model", "sst2", "mnli", "average", "normalised"]
    assert [line.split()[0] for line in lines[2:4]] == ["merged", "individual"]
    assert lines[3].split()[-1] == "1.000"
    assert f"results and predictions in {out}" in printed
    assert "32/32 examples" in err
    results = Results.from_json(json.loads((out / "results.json").read_text()))
    assert set(results.models["merged"]["heads"]) == {"sst2", "mnli"}
    assert results.arguments["models"] == {"merged": "merged"}
    for row in ("merged", "individual"):
        for task in ("sst2", "mnli"):
            file = out / "predictions" / row / f"{task}.jsonl"
            _, *answers = map(json.loads, file.read_text().splitlines())
            share = sum(a["target"] == a["prediction"] for a in answers) / len(answers)
            assert share == pytest.approx(results.scores[row][task]["accuracy"].value)
    table = (out / "results.md").read_text()
    assert lines[2].split()[1] in table
    assert sorted(p.name for p in out.iterdir()) == ["predictions", "results.json", "results.md"]
    assert not list(place.glob(".*"))


def test_what_mats_merge_wrote(mats: Run, place: Path) -> None:
    """The heads it kept apart are found by the tasks' names."""
    models = [f"--model={place / 'tuned' / name}" for name in ("sst2", "mnli")]
    code, _, err = mats("merge", *models, "--out", place / "new")
    assert code == 0, err
    code, printed, err = mats("evaluate", place / "new", *tasks(place), "--json")
    assert code == 0, err
    found = json.loads(printed)
    merged = BertModel.from_pretrained(place / "new", add_pooling_layer=True).eval()
    tokenizer = make_tokenizer()
    for name, num in (("sst2", 2), ("mnli", 3)):
        head = load_file(place / "new" / "heads" / f"{name}.safetensors")
        right = 0
        for i, text in enumerate(SENTENCES):
            with torch.no_grad():
                pooled = merged(**tokenizer(text, return_tensors="pt")).pooler_output[0]
            logits = head["classifier.weight"] @ pooled + head["classifier.bias"]
            right += int(logits.argmax()) == i % num
        assert found["scores"]["new"][name]["accuracy"]["value"] == right / len(SENTENCES)


def test_json_quiet_and_overwrite(
    mats: Run, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()  # what saving the models printed
    arguments = ["evaluate", f"m={place / 'merged'}", *tasks(place), "--out", place / "out"]
    code, printed, err = mats(*arguments, "--json", "--num-examples", 5, "--batch-size", 2)
    assert (code, err) == (0, "")
    assert printed == (place / "out" / "results.json").read_text()
    assert json.loads(printed)["tasks"]["sst2"]["num_examples"] == 5
    code, _, err = mats(*arguments)
    assert code == 1
    assert "exists already; replace it with --overwrite" in err
    assert mats(*arguments, "-q", "--overwrite") == (0, "", "")
    found = json.loads((place / "out" / "results.json").read_text())
    assert list(found["scores"]) == ["m"]
    assert found["tasks"]["sst2"]["num_examples"] == 8
    (place / "other").mkdir()
    (place / "other" / "file").touch()
    code, _, err = mats(*arguments[:-1], place / "other", "--overwrite")
    assert code == 1
    assert "holds no evaluation of ours" in err
    assert (place / "other" / "file").exists()


def test_an_ensemble(mats: Run, place: Path) -> None:
    save(BertForSequenceClassification(bert_config(num_labels=2)), place / "b", make_tokenizer())
    code, printed, err = mats(
        "evaluate", place / "tuned" / "sst2", place / "b", "--task", place / "sst2.yaml",
        "--ensemble",
    )  # fmt: skip
    assert code == 0, err
    assert [line.split()[0] for line in printed.splitlines()[2:5]] == ["sst2", "b", "ensemble"]


def test_beside_the_harness(mats: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(LlamaForCausalLM(llama_config()), tmp_path / "m", make_tokenizer(end=False))
    rows = [{"input": t, "choices": ["a", "b c"], "label": 0} for t in SENTENCES]
    write_rows(tmp_path / "d.jsonl", rows)
    (tmp_path / "t.yaml").write_text("task: multiple_choice\ndata: d.jsonl\n")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = mats("evaluate", model, "--lm-eval", "arc_easy")
    assert code == 1
    assert "matsmerge[lm-eval]" in err
    scores = {"arc_easy": {"acc,none": 0.25, "acc_stderr,none": 0.05}}
    install(monkeypatch, lambda **_: {"results": scores}, names=("arc_easy",))
    code, printed, err = mats("evaluate", model, "--lm-eval", "arc_easy", "-o", tmp_path / "out")
    assert code == 0, err
    assert printed.splitlines()[2].split() == ["m", "25.0", "±", "5.0"]
    assert (tmp_path / "out" / "results.json").is_file()
    both = mats("evaluate", model, "--lm-eval", "arc_easy", "--task", tmp_path / "t.yaml")
    assert both[0] == 0, both[2]
    assert both[1].splitlines()[1].split() == ["model", "t", "accuracy", "arc_easy", "acc", "average"]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("", [], "no data"),
        ("data: sst2.jsonl\ncolumns: {text: s}\nlabels: [bad, good, fair]", [], "expected 2 different names"),
        ("data: high.jsonl", [], "row 2: label 2 is out of range"),
        ("data: sst2.jsonl", [], "no column 'text'"),
        ("data: {train: sst2.jsonl}\ncolumns: {text: s}", [], "has no split 'test', only train"),
        ("data: {test: sst2.jsonl}\ncolumns: {text: s}", ["--split", "dev"], "has no split 'dev'"),
        ("data: sst2.jsonl\ntemplate: 'is {sentence} good'", [], "no column 'sentence', which the template names"),
        ("data: sst2.jsonl\ncolumns: {text: s}\nhead: merged/heads/mnli.safetensors", [], "label"),
        ("data: sst2.jsonl\ncolumns: {text: s}\nhead: wrong.safetensors", [], "'classifier.weight' is .4, 5."),
        ("data: sst2.jsonl\ncolumns: {text: s}\nmetrics: [f2]", [], "there is no metric 'f2'"),
        ("data: sst2.jsonl\ncolumns: {text: s}\nmetrics: [exact_match]", [], "does not fit the task sequence_classification"),
        ("data: sst2.jsonl\ncolumns: {text: s}", ["--ensemble"], "at least two models"),
        ("data: sst2.jsonl\ncolumns: {text: s}", ["--individual", "x"], "expected TASK=MODEL"),
        ("data: sst2.jsonl\ncolumns: {text: s}", ["--individual", "x=y"], "there is no task 'x'"),
        ("data: sst2.jsonl\ncolumns: {text: s}", ["--device", "cuda"], "cannot be put there"),
        ("data: sst2.jsonl\ncolumns: {text: s}", ["--dtype", "int3"], "no dtype 'int3'"),
    ],
)  # fmt: skip
def test_errors(mats: Run, place: Path, task: str, options: list[str], message: str) -> None:
    write_rows(place / "high.jsonl", [{"text": "a", "label": 0}, {"text": "b", "label": 2}])
    save_file({"classifier.weight": torch.zeros(4, 5)}, place / "wrong.safetensors")
    (place / "task.yaml").write_text(f"{task}\ntask: sequence_classification\nname: task\n")
    model = place / "merged" if "head:" in task else place / "tuned" / "sst2"
    if "mnli" in task:  # a head of three classes for data with a fourth
        rows = [{"s": "a", "label": 3}]
        write_rows(place / "sst2.jsonl", rows)
    out = place / "out"
    code, printed, err = mats("evaluate", model, "--task", place / "task.yaml", "-o", out, *options)
    assert code == 1, err
    assert re.search(message, err.replace("\n", " ")), err
    assert printed == ""
    assert "examples, left" not in err
    assert not out.exists()


def test_wrong_command_lines(mats: Run, place: Path) -> None:
    model, task = place / "tuned" / "sst2", place / "sst2.yaml"
    for arguments, message in (
        ([model], "--task FILE, or --lm-eval TASKS"),
        ([model, "--lm-eval", "x", "--ensemble"], "are for tasks given with --task"),
        ([model, model, "--task", task], "given twice"),
        ([f"a={model}", f"a={place / 'merged'}", "--task", task], "two models are named 'a'"),
        ([place / "merged", "--task", place / "none.yaml"], "none.yaml"),
        ([model, "--task", task, "-o", place / "sst2.jsonl"], "holds no evaluation of ours"),
    ):  # fmt: skip
        code, _, err = mats("evaluate", *arguments)
        assert code == 1, err
        assert message in err
    (place / "rte.yaml").write_text(task.read_text())
    code, _, err = mats("evaluate", place / "merged", "--task", place / "rte.yaml")
    assert code == 1
    assert "has no head for the task 'rte', only for mnli, sst2" in err
