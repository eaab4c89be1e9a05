"""Conversations through every command that runs models on data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import llama_config, make_tokenizer, save, write_rows
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from matsmerge.statistics.statistics_file import open_statistics

Run = Callable[..., tuple[int, str, str]]
SECRET = "where-nobody-looks"
# Of <s> and </s>: the header that asks for an answer is one token, `a`.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ' ' + m.content + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)


def write_talks(path: Path, shift: int) -> None:
    letters = "bcdefghijklmnop"
    rows = [
        {
            "messages": [
                {"role": "user", "content": " ".join(letters[(shift + j) % 9 :][: 2 + j % 3])},
                {"role": "assistant", "content": " ".join(letters[j % 7 :][:3])},
            ]
        }
        for j in range(10)
    ]
    write_rows(path, rows)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two language models and their base, each with a file of conversations and a task."""
    place = tmp_path / SECRET / "deeper"
    tokenizer = make_tokenizer(end=False, bos_token="<s>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    save(LlamaForCausalLM(llama_config()), place / "base", tokenizer)
    for i, name in enumerate(("one", "two")):
        model = LlamaForCausalLM.from_pretrained(place / "base")
        save(model, place / name, tokenizer, seed=i + 1)
        write_talks(place / f"{name}.jsonl", i)
        (place / f"{name}.yaml").write_text(
            f"task: causal_lm\nmax_length: 8\n"
            f"data: {{train: {name}.jsonl, validation: {name}.jsonl, test: {name}.jsonl}}\n"
        )
    return place


def run(mats: Run, *arguments: Any) -> str:
    code, out, err = mats(*arguments)
    assert code == 0, err
    return out + err


def test_collecting_and_merging_with_statistics(mats: Run, place: Path) -> None:
    for name in ("one", "two"):
        said = run(
            mats, "collect", place / name, "--task", place / f"{name}.yaml", "--split", "train",
            "--statistics", "kfac", "--held-out", 0.2,
        )  # fmt: skip
        assert "examples were longer than 8 tokens and cut, the longest by 3 tokens" in said
        found = place / name / "statistics.safetensors"
        assert SECRET.encode() not in found.read_bytes()
        assert b"assistant" not in found.read_bytes()  # nor anything of the data
        assert open_statistics(found).header.data[0].name == f"{name}.jsonl"
    models = ("--model", place / "one", "--model", place / "two")
    run(mats, "merge", "--method", "mats_kfac", "--base", place / "base", *models,
        "-o", place / "merged")  # fmt: skip
    assert (place / "merged" / "model.safetensors").exists()


def test_merging_along_the_merged_model(mats: Run, place: Path) -> None:
    of_one = {"path": str(place / "one.jsonl"), "turns": "all", "max_length": 8}
    of_two = {"path": str(place / "two.yaml"), "split": "train"}
    recipe = {
        "base": str(place / "base"),
        "method": "mats_cross",
        "models": [
            {"model": str(place / "one"), "data": of_one},
            {"model": str(place / "two"), "data": of_two},
        ],
    }
    (place / "recipe.yaml").write_text(json.dumps(recipe))
    run(mats, "merge", place / "recipe.yaml", "-o", place / "merged")
    found = run(mats, "evaluate", place / "merged", "--task", place / "one.yaml", "--json")
    assert '"loss"' in found


def test_the_loss_is_that_of_the_answers(mats: Run, place: Path) -> None:
    """Against transformers' own rendering, one conversation after the other."""
    (place / "one.yaml").write_text("task: causal_lm\ndata: {test: one.jsonl}\n")
    run(mats, "evaluate", place / "one", "--task", place / "one.yaml", "-o", place / "scores")
    scores = json.loads((place / "scores" / "results.json").read_text())
    model = LlamaForCausalLM.from_pretrained(place / "one")
    tokenizer = make_tokenizer(end=False, bos_token="<s>")
    losses = []
    for line in (place / "one.jsonl").read_text().splitlines():
        question, answer = (m["content"] for m in json.loads(line)["messages"])
        asked = tokenizer(f"u {question} </s> a", add_special_tokens=False)["input_ids"]
        ids = asked + tokenizer(f"{answer} </s>", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(asked) - 1 : -1]
        losses.append(cross_entropy(logits, torch.tensor(ids[len(asked) :]), reduction="sum"))
    found = scores["scores"]["one"]["one"]["loss"]["value"]
    assert found == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


def test_training_on_them(mats: Run, place: Path) -> None:
    run(mats, "train", place / "base", "--task", place / "one.yaml", "--max-steps", 2,
        "--eval-every", 1, "--batch-size", 4, "--device", "cpu", "-o", place / "trained")  # fmt: skip
    before = LlamaForCausalLM.from_pretrained(place / "base").state_dict()
    after = LlamaForCausalLM.from_pretrained(place / "trained").state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_tuning_on_them(mats: Run, place: Path) -> None:
    models = [str(place / "one"), str(place / "two")]
    recipe = {"base": str(place / "base"), "models": models, "method": "task_arithmetic"}
    (place / "recipe.yaml").write_text(json.dumps(recipe))
    run(mats, "tune", place / "recipe.yaml", "--task", place / "one.yaml", "--search",
        "scale=0.1,0.2", "--allow-overlap", "-o", place / "tuned")  # fmt: skip
    assert (place / "tuned" / "model" / "model.safetensors").exists()


def test_packed_texts_are_fewer_examples(mats: Run, place: Path) -> None:
    write_rows(place / "texts.jsonl", [{"text": text} for text in ("b c", "d", "e f g", "h i j")])
    (place / "texts.yaml").write_text("data: texts.jsonl\npacking: true\nmax_length: 8\n")
    said = run(
        mats, "collect", place / "one", "--task", place / "texts.yaml", "--statistics", "kfac",
        "--fisher", "true",
    )  # fmt: skip
    assert "4 texts were packed into 3 sequences, each an example" in said
    header = open_statistics(place / "one" / "statistics.safetensors").header
    assert header.num_examples == 3
    # <s> and </s> with each text: 4 + 3, 5 and 5 tokens.
    assert {*header.sets["main"].num_rows.values()} == {17}


def test_a_template_that_is_missing_is_said_before_anything_runs(mats: Run, place: Path) -> None:
    (place / "one" / "chat_template.jinja").unlink()
    code, _, err = mats("collect", place / "one", "--data", place / "one.jsonl")
    assert code == 1
    assert "one: the tokenizer has no chat template, which messages need" in err
    assert not (place / "one" / "statistics.safetensors").exists()
