"""Handing over to lm-evaluation-harness, with a stand-in for it."""

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from tiny_models import llama_config, make_tokenizer, save
from transformers import LlamaForCausalLM

from matsmerge.errors import DataError
from matsmerge.lab.evaluation.harness import Harness
from matsmerge.lab.evaluation.task_evaluation import Settings

FOUND = {
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
        return FOUND

    class TaskManager:
        all_tasks = ("hellaswag", "gsm8k", "wikitext", "arc_easy")

    library: Any = ModuleType("lm_eval")
    tasks: Any = ModuleType("lm_eval.tasks")
    library.simple_evaluate, library.__version__, tasks.TaskManager = simple_evaluate, "9.9", TaskManager  # fmt: skip
    monkeypatch.setitem(sys.modules, "lm_eval", library)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    return found


def make(tmp_path: Path) -> tuple[Path, Path]:
    base = save(LlamaForCausalLM(llama_config()), tmp_path / "base", make_tokenizer())
    model = get_peft_model(
        LlamaForCausalLM.from_pretrained(base),
        LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2),
    )
    model.save_pretrained(tmp_path / "adapter")
    return base, tmp_path / "adapter"


def test_what_is_handed_over(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    base, adapter = make(tmp_path)
    settings = Settings(num_examples=40, batch_size=8, device="cpu", dtype="float32")
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
    base = save(LlamaForCausalLM(llama_config()), tmp_path / "m", make_tokenizer())
    with pytest.raises(DataError, match="gave no scores for the task 'arc_easy'"):
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
