"""The suite of generative tasks, with two of them and a tiny model."""

from pathlib import Path

import pytest
import torch
from tiny_models import write_rows
from transformers import LlamaConfig, LlamaForCausalLM

from matsmerge.lab.evaluation.results import ENSEMBLE, INDIVIDUAL
from matsmerge.lab.experiments.sources.small_lm import chat, make_tokenizer
from matsmerge.lab.experiments.suite import Suite, find_suite, make_suite
from matsmerge.lab.experiments.suite_results import BASE, JOINT
from matsmerge.lab.experiments.suite_run import run_suite

SPLITS = {"train": 4, "statistics": 4, "validation": 2, "test": 2}


def tiny() -> Suite:
    """Everything that the suite has of two tasks, on very little data."""
    content = find_suite("causal-small").model_dump(mode="json", exclude_unset=True)
    content["seeds"] = [0]
    content["tasks"] = {
        name: {**content["tasks"][name], "splits": SPLITS} for name in ("larger", "movies")
    }
    for variant in content["variants"].values():
        variant["training"].update(epochs=1, batch_size=4)
        variant["num_examples"] = 4
    for method in content["methods"].values():
        if method.get("search"):
            ((name, values),) = method["search"].items()
            method["search"] = {name: values[:1] if isinstance(values, list) else [0.5]}
    return make_suite("tiny", content)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A base that can tell digits apart, and rows of both tasks."""
    rows = [{"text": f"{n} or 20", "label": "20"} for n in range(10, 18)]
    rows += [{"text": f"{n} or 21", "label": "21"} for n in range(10, 18)]
    (tmp_path / "data").mkdir()
    for task in ("larger", "movies"):
        write_rows(tmp_path / "data" / f"{task}.jsonl", rows)
    tokenizer = make_tokenizer([chat("Larger: 12 or 3", "12")])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path


@pytest.mark.long
def test_every_method_merges_what_both_variants_train(place: Path) -> None:
    suite = tiny()
    results = run_suite(
        suite, place / "run", base=place / "base", data=place / "data", num_workers=1
    )
    assert set(results.variants) == {"full", "lora"}
    for found in results.variants.values():
        rows = {row.method: row.test.tasks for row in found.comparison}
        assert set(rows) == {*suite.methods, BASE, INDIVIDUAL, JOINT, ENSEMBLE}
        assert all(set(scores) == {"larger", "movies"} for scores in rows.values())
