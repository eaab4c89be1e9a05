"""Handing over to lm-evaluation-harness: with a stand-in for it, and for real."""

import importlib
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from stand_in_harness import accuracy, install, letter_tokenizer, write_task
from tiny_models import llama_config, make_tokenizer, save
from transformers import LlamaForCausalLM

from matsmerge.errors import DataError
from matsmerge.lab import evaluate
from matsmerge.lab.evaluation.harness import Harness
from matsmerge.lab.evaluation.task_evaluation import EvaluationSettings

FOUND: dict[str, Any] = {
    "results": {
        "hellaswag": {
            "alias": "hellaswag",
            "acc,none": 0.5,
            "acc_stderr,none": 0.02,
            "acc_norm,none": 0.6,
            "acc_norm_stderr,none": 0.03,
            "sample_len": 40,
        },
        "gsm8k": {
            "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": "N/A",
            "exact_match,flexible-extract": 0.5,
            "exact_match_stderr,flexible-extract": 0.1,
        },
        "wikitext": {"word_perplexity,none": 12.5, "word_perplexity_stderr,none": "N/A"},
    },
    "n-samples": {"hellaswag": {"original": 10000, "effective": 40}},
    "higher_is_better": {
        "hellaswag": {"acc": True, "acc_norm": True},
        "wikitext": {"word_perplexity": False},
    },
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def simple_evaluate(**options: Any) -> Any:
        found.append(options)
        results = {task: FOUND["results"].get(task, {}) for task in options["tasks"]}
        return {**FOUND, "results": results}

    install(monkeypatch, simple_evaluate, names=("hellaswag", "gsm8k", "wikitext", "arc_easy"))
    return found


def make(tmp_path: Path, tokenizer: Any = None) -> tuple[Path, Path]:
    base = save(LlamaForCausalLM(llama_config()), tmp_path / "base", tokenizer or make_tokenizer())
    config = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), config)
    model.save_pretrained(tmp_path / "adapter")
    return base, tmp_path / "adapter"


def test_what_is_handed_over(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    base, adapter = make(tmp_path)
    settings = EvaluationSettings(num_examples=40, batch_size=8, device="cpu", dtype="float32")
    results = Harness(["hellaswag", "gsm8k", "wikitext"]).run(
        {"base": str(base), "lora": str(adapter)}, settings
    )
    assert [call["model_args"] for call in calls] == [
        {"pretrained": str(base), "dtype": "float32"},
        {"pretrained": str(base), "peft": str(adapter), "dtype": "float32"},
    ]
    for call in calls:
        assert call["model"] == "hf"
        assert call["tasks"] == ["hellaswag", "gsm8k", "wikitext"]
        assert (call["limit"], call["batch_size"], call["device"]) == (40, 8, "cpu")
    scores = results.scores["lora"]
    assert list(scores["hellaswag"]) == ["acc", "acc_norm"]
    assert (scores["hellaswag"]["acc_norm"].value, scores["hellaswag"]["acc_norm"].error) == (0.6, 0.03)  # fmt: skip
    assert list(scores["gsm8k"]) == ["exact_match/strict-match", "exact_match/flexible-extract"]
    assert math.isnan(scores["gsm8k"]["exact_match/strict-match"].error)
    how = results.tasks["wikitext"].metrics["word_perplexity"]
    assert (how.higher_is_better, how.in_percent) == (False, False)
    assert results.tasks["hellaswag"].num_examples == 40
    assert results.versions["lm_eval"] == "9.9"
    assert results.models["base"]["fingerprint"] != results.models["lora"]["fingerprint"]


def test_unknown_tasks_and_no_results(
    calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="no task 'helaswag'; did you mean 'hellaswag'?"):
        Harness(["helaswag"])
    with pytest.raises(DataError, match=r"^\S*/no.yaml: no such file; expected a task"):
        Harness([str(tmp_path / "no.yaml")])
    with pytest.raises(DataError, match="give at least one task"):
        Harness([])
    base = save(LlamaForCausalLM(llama_config()), tmp_path / "m", make_tokenizer())
    with pytest.raises(DataError, match="gave no scores for arc_easy"):
        Harness(["arc_easy"]).run({"m": str(base)})

    def fail(**_: Any) -> None:
        raise ValueError("no such dataset\nand more")

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", fail)
    with pytest.raises(DataError, match=r"lm-evaluation-harness failed \(no such dataset\)"):
        Harness(["gsm8k"]).run({"m": str(base)})


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError):
        importlib.import_module("lm_eval")
    with pytest.raises(DataError, match=r"needs lm_eval.*pip install 'matsmerge\[lm-eval\]'"):
        Harness(["gsm8k"])


def test_a_group_stands_for_its_members(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One with a score of its own; the members of others are shown themselves."""
    scores = {name: {"acc,none": 0.5} for name in ("mmlu", "mmlu_law", "arc_easy")}
    found = {
        "results": {**scores, "arc": {"alias": "arc"}},
        "group_subtasks": {"mmlu": ["mmlu_law"], "arc": ["arc_easy"]},
    }
    install(monkeypatch, lambda **_: found, names=("mmlu", "arc"))
    base = save(LlamaForCausalLM(llama_config()), tmp_path / "m", make_tokenizer())
    assert list(Harness(["mmlu", "arc"]).run({"m": str(base)}).tasks) == ["mmlu", "arc_easy"]
    install(monkeypatch, lambda **_: None, names=("mmlu",))
    with pytest.raises(DataError, match="gave no results"):
        Harness(["mmlu"]).run({"m": str(base)})


@pytest.mark.filterwarnings("ignore")  # of a library that is not ours
def test_the_documented_task_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are those of the model itself, and of the adapter on its base."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    page = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text()
    (task,) = re.findall(r"^```\n(task: letters\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    write_task(tmp_path, "validation")
    (tmp_path / "documented.yaml").write_text(task)
    base, adapter = make(tmp_path, letter_tokenizer())
    models = {"base": base, "lora": adapter}
    monkeypatch.chdir(tmp_path)
    found = evaluate(models, lm_eval=["documented.yaml"], num_examples=30, device="cpu")
    assert found.tasks["letters"].num_examples == 30
    assert found.arguments["lm_eval"] == ["documented.yaml"]
    model = LlamaForCausalLM.from_pretrained(base)
    expected = {"base": accuracy(model, tmp_path / "validation.jsonl", 30)}
    adapted = PeftModel.from_pretrained(model, str(adapter))
    expected["lora"] = accuracy(adapted, tmp_path / "validation.jsonl", 30)
    assert expected["base"] != expected["lora"]
    for name, share in expected.items():
        score = found.scores[name]["letters"]["acc"]
        assert score.value == pytest.approx(share)
        assert score.error == pytest.approx(math.sqrt(share * (1 - share) / 29))
