"""Answers by generation: in batches as one at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, get_peft_model
from tiny_models import (
    bart_config,
    gpt2_config,
    llama_config,
    make_tokenizer,
    save,
    t5_config,
    write_rows,
)
from transformers import (
    BartForConditionalGeneration,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

from matsmerge.data.rows import Data
from matsmerge.errors import DataError
from matsmerge.lab.evaluation.task_evaluation import evaluate_task
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task_file import TaskFile

SENTENCES = ["a b c", "d", "e f g h", "b a", "c c d a e", "k l", "n a o p b c d", "m"]
MODELS: dict[str, Callable[[], Any]] = {
    "t5": lambda: T5ForConditionalGeneration(t5_config()),
    "bart": lambda: BartForConditionalGeneration(bart_config()),
    "llama": lambda: LlamaForCausalLM(llama_config()),
    "gpt2": lambda: GPT2LMHeadModel(gpt2_config()),
}
MAX_NEW_TOKENS = 6


def make(name: str, tmp_path: Path) -> tuple[Any, Any, Path]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    tokenizer = make_tokenizer(begin=False, end=model.config.is_encoder_decoder)
    return model, tokenizer, save(model, tmp_path / "model", tokenizer, seed=4)


def write(tmp_path: Path, targets: list[str]) -> Data:
    rows = [{"input": t, "target": y} for t, y in zip(SENTENCES, targets, strict=True)]
    return write_rows(tmp_path / "d.jsonl", rows)


def one_at_a_time(model: Any, tokenizer: Any) -> list[str]:
    texts = []
    for text in SENTENCES:
        inputs = tokenizer(text, return_tensors="pt")
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        said = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False,
            pad_token_id=0,
        )[0]  # fmt: skip
        new = said[1:] if model.config.is_encoder_decoder else said[ids.shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_size", [1, 5])
def test_texts(name: str, batch_size: int, tmp_path: Path) -> None:
    model, tokenizer, folder = make(name, tmp_path)
    expected = one_at_a_time(model, tokenizer)
    assert len(set(expected)) > 2
    # Half of the targets are what the model says, with other white space.
    targets = [f" {t}\n" if i % 2 else f"{t} a" for i, t in enumerate(expected)]
    file = TaskFile(name="x", generate=MAX_NEW_TOKENS, metrics=["exact_match", "loss"])
    data = write(tmp_path, targets)
    outcome = evaluate_task(load_model(folder), data, file, batch_size=batch_size)
    assert [answer.prediction for answer in outcome.answers] == expected
    assert [answer.target for answer in outcome.answers] == targets
    scores = outcome.scores(["exact_match", "loss"])
    assert scores["exact_match"].value == 0.5
    only_loss = TaskFile(name="x")
    by_loss = evaluate_task(load_model(folder), data, only_loss).score("loss")
    assert scores["loss"].value == pytest.approx(by_loss.value)


def test_settings_for_sampling_do_not_count(tmp_path: Path) -> None:
    model, tokenizer, folder = make("llama", tmp_path)
    expected = one_at_a_time(model, tokenizer)
    settings = model.generation_config
    settings.update(do_sample=True, temperature=5.0, top_k=3, max_length=3, num_beams=2)
    settings.save_pretrained(folder)
    file = TaskFile(name="x", generate=MAX_NEW_TOKENS)
    outcome = evaluate_task(load_model(folder), write(tmp_path, ["a"] * len(SENTENCES)), file)
    assert [answer.prediction for answer in outcome.answers] == expected


def test_an_adapter(tmp_path: Path) -> None:
    _, tokenizer, folder = make("t5", tmp_path)
    config = IA3Config(
        task_type="SEQ_2_SEQ_LM", target_modules=["k", "v", "wo"], feedforward_modules=["wo"]
    )
    adapted = get_peft_model(T5ForConditionalGeneration.from_pretrained(folder), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))  # fmt: skip
    adapted.eval().save_pretrained(tmp_path / "adapter")
    file = TaskFile(name="x", generate=MAX_NEW_TOKENS)
    loaded = load_model(tmp_path / "adapter")
    outcome = evaluate_task(loaded, write(tmp_path, ["a"] * len(SENTENCES)), file)
    assert [answer.prediction for answer in outcome.answers] == one_at_a_time(adapted, tokenizer)


def test_the_prompt_does_not_depend_on_the_target(tmp_path: Path) -> None:
    """A long target would cut the prompt of an example that is scored by its loss."""
    _, _, folder = make("gpt2", tmp_path)
    file = TaskFile(name="x", generate=20, max_length=16)
    rows = [{"input": " ".join("abcdefghijklmnop"), "target": t} for t in ("a", "a b c d e f g h")]
    loaded = load_model(folder, file)
    short, long = evaluate_task(loaded, write_rows(tmp_path / "d.jsonl", rows), file).answers
    assert short.prediction == long.prediction
    # Of 32 positions, 20 are for the answer.
    rows = [{"input": " ".join("efghijklmnop"), "target": "a"}]
    cut = evaluate_task(loaded, write_rows(tmp_path / "e.jsonl", rows), file).answers[0]
    assert cut.prediction == short.prediction


@pytest.mark.parametrize(("name", "num"), [("gpt2", 32), ("bart", 12)])
def test_more_than_fits(name: str, num: int, tmp_path: Path) -> None:
    _, _, folder = make(name, tmp_path)
    data = write(tmp_path, ["a"] * len(SENTENCES))
    file = TaskFile(name="x", generate=num)
    with pytest.raises(DataError, match=f"generate: {num} tokens do not fit the {num} positions"):
        evaluate_task(load_model(folder), data, file)
    file = TaskFile(name="x", generate=num - 1)
    assert len(evaluate_task(load_model(folder), data, file)) == len(SENTENCES)


def test_text_alone_is_no_question(tmp_path: Path) -> None:
    _, _, folder = make("llama", tmp_path)
    data = write_rows(tmp_path / "d.jsonl", [{"text": "a b"}])
    with pytest.raises(DataError, match="has no column 'input'"):
        evaluate_task(load_model(folder), data, TaskFile(name="x", generate=3))
