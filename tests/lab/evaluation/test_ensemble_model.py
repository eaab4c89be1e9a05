"""Ensembles that write: in batches with caches as a slow loop over single examples without."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import (
    gpt2_config,
    llama_config,
    make_tokenizer,
    save,
    t5_config,
    write_rows,
)
from torch import Tensor
from transformers import (
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

from matsmerge.errors import DataError
from matsmerge.lab.evaluation.comparison import evaluate
from matsmerge.lab.evaluation.ensemble_model import EnsembleModel
from matsmerge.tasks.task_file import TaskFile

SENTENCES = ["a b c", "d", "e f g h", "b a", "c c d a e", "k l", "n a o p b c d", "m"]
MODELS: dict[str, Callable[[], Any]] = {
    "t5": lambda: T5ForConditionalGeneration(t5_config()),
    "llama": lambda: LlamaForCausalLM(llama_config()),
    "gpt2": lambda: GPT2LMHeadModel(gpt2_config()),
}
NUM_NEW = 6


def make(name: str, tmp_path: Path, num: int = 3) -> tuple[list[Any], Any, dict[str, Path]]:
    """Models with large random weights, so that each is sure of something else."""
    models, places = [], {}
    for seed in range(num):
        torch.manual_seed(seed)
        model = MODELS[name]().double()
        tokenizer = make_tokenizer(begin=False, end=model.config.is_encoder_decoder)
        places[f"m{seed}"] = save(model, tmp_path / f"m{seed}", tokenizer, seed=seed + 4)
        models.append(model.eval())
    return models, tokenizer, places


def task(tmp_path: Path, **more: Any) -> TaskFile:
    rows = [{"input": t, "target": SENTENCES[-1 - i]} for i, t in enumerate(SENTENCES)]
    write_rows(tmp_path / "d.jsonl", rows)
    return TaskFile(name="x", data=str(tmp_path / "d.jsonl"), **more)


@torch.no_grad()
def next_token(models: Sequence[Any], prompt: Tensor, said: list[int]) -> Tensor:
    """Mean probabilities, from all that there is so far."""
    each = []
    for model in models:
        if model.config.is_encoder_decoder:
            start = model.config.decoder_start_token_id
            shown = torch.tensor([[start, *said]])
            logits = model(input_ids=prompt, decoder_input_ids=shown).logits
        else:
            logits = model(input_ids=torch.cat([prompt, torch.tensor([said]).long()], 1)).logits
        each.append(logits[0, -1].softmax(-1))
    mean: Tensor = torch.stack(each).mean(0)
    return mean


def slow_loop(models: Sequence[Any], tokenizer: Any) -> list[str]:
    texts = []
    for text in SENTENCES:
        prompt = tokenizer(text, return_tensors="pt")["input_ids"]
        said: list[int] = []
        while len(said) < NUM_NEW:
            token = int(next_token(models, prompt, said).argmax())
            if token == tokenizer.eos_token_id:
                break
            said.append(token)
        texts.append(tokenizer.decode(said, skip_special_tokens=True))
    return texts


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        *((name, 5) for name in MODELS),
        ("gpt2", 1),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in MODELS if name != "gpt2"),
    ],
)
def test_texts_and_losses(name: str, batch_size: int, tmp_path: Path) -> None:
    models, tokenizer, places = make(name, tmp_path)
    file = task(tmp_path, generate=NUM_NEW, metrics=["exact_match", "loss"])
    found = evaluate(places, [file], ensemble=True, batch_size=batch_size)
    outcome = found.outcomes["ensemble"]["x"]
    texts = [answer.prediction for answer in outcome.answers]
    assert texts == slow_loop(models, tokenizer)
    for row in places:
        alone = [answer.prediction for answer in found.outcomes[row]["x"].answers]
        assert alone != texts
    assert list(found.scores) == [*places, "ensemble"]
    for answer in outcome.answers:
        prompt = tokenizer(SENTENCES[answer.number], return_tensors="pt")["input_ids"]
        target = tokenizer(answer.target)["input_ids"]
        if not models[0].config.is_encoder_decoder:
            target = [*target, tokenizer.eos_token_id]
        terms = [next_token(models, prompt, target[:t])[y].log() for t, y in enumerate(target)]
        assert answer.loss == pytest.approx(-float(torch.stack(terms).sum()), rel=1e-9)
    # Without `generate:` there is the loss alone.
    plain = evaluate(places, [task(tmp_path)], ensemble=True)
    expected = found.scores["ensemble"]["x"]["loss"].value
    assert plain.scores["ensemble"]["x"]["loss"].value == pytest.approx(expected)


def test_one_model_twice_is_that_model(tmp_path: Path) -> None:
    _, _, places = make("llama", tmp_path, 1)
    file = task(tmp_path, generate=NUM_NEW)
    found = evaluate({"a": places["m0"], "b": places["m0"]}, [file], ensemble=True)
    one, both = (found.outcomes[row]["x"].answers for row in ("a", "ensemble"))
    assert [answer.prediction for answer in both] == [answer.prediction for answer in one]


def test_adapters_have_a_base_each(tmp_path: Path) -> None:
    models, tokenizer, places = make("llama", tmp_path, 1)
    adapted = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        base = LlamaForCausalLM.from_pretrained(places["m0"], dtype=torch.float64)
        config = LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        model = get_peft_model(base, config, autocast_adapter_dtype=False)
        model.save_pretrained(tmp_path / f"adapter{seed}")
        adapted.append(model.eval().merge_and_unload())
    file = task(tmp_path, generate=NUM_NEW)
    found = evaluate([tmp_path / "adapter1", tmp_path / "adapter2"], [file], ensemble=True)
    texts = [answer.prediction for answer in found.outcomes["ensemble"]["x"].answers]
    assert texts == slow_loop(adapted, tokenizer)
    assert texts != slow_loop(models, tokenizer)


def test_tokenizers_must_be_the_same(tmp_path: Path) -> None:
    _, tokenizer, places = make("llama", tmp_path, 2)
    other = make_tokenizer(begin=True, end=False)
    save(LlamaForCausalLM(llama_config()), tmp_path / "begins", other)
    places["begins"] = tmp_path / "begins"
    tokenizer.add_tokens(["another"])
    save(LlamaForCausalLM(llama_config(vocab_size=len(tokenizer))), tmp_path / "more", tokenizer)
    places["more"] = tmp_path / "more"
    with pytest.raises(DataError) as info:
        evaluate(places, [task(tmp_path, generate=NUM_NEW)], ensemble=True)
    assert len(info.value.problems) == 2
    for name, problem in zip(("begins", "more"), info.value.problems, strict=True):
        assert f"that of {name} differs from that of m0" in problem


def test_what_one_model_cannot_do_is_said_and_nobody_waits_for_it(tmp_path: Path) -> None:
    models, _, _ = make("llama", tmp_path, 2)

    def fail(**_: Any) -> Tensor:
        raise ValueError("no text from me")

    models[1].generate = fail
    with pytest.raises(ValueError, match="no text from me"):
        EnsembleModel(models).generate(
            input_ids=torch.tensor([[3, 4]]), max_new_tokens=3, pad_token_id=0
        )
