from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import llama_config, make_tokenizer, save, t5_config, write_rows
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, T5ForConditionalGeneration

from matsmerge.errors import DataError
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task import encode_all
from matsmerge.tasks.task_file import TaskFile

ROWS: list[dict[str, Any]] = [
    {"input": "a b", "choices": ["c", "d e f"], "label": 1},
    {"input": "g", "choices": ["h", "i j", "k"], "label": "i j"},
]
MODELS: dict[str, Callable[[], Any]] = {
    "t5": lambda: T5ForConditionalGeneration(t5_config()),
    "llama": lambda: LlamaForCausalLM(llama_config()),
}


def score(model: Any, tokenizer: Any, text: str, choice: str, mean: bool) -> torch.Tensor:
    """The log-probability of one choice, alone."""
    prompt = tokenizer(text)["input_ids"]
    answer = [*tokenizer(choice, add_special_tokens=False)["input_ids"], 3]
    if model.config.is_encoder_decoder:
        logits = model(
            input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([[0, *answer[:-1]]])
        ).logits[0]
    else:
        prompt = prompt[:-1]
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return -cross_entropy(logits, torch.tensor(answer), reduction="mean" if mean else "sum")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length_normalize", [False, True])
def test_scores(name: str, length_normalize: bool, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(begin=False)
    folder = save(MODELS[name](), tmp_path / "m", tokenizer)
    file = TaskFile(task="multiple_choice", length_normalize=length_normalize)
    loaded = load_model(folder, file)
    examples = encode_all(loaded.task, write_rows(tmp_path / "d.jsonl", ROWS))
    batch = loaded.task.collate(examples).to("cpu")
    assert batch.starts == [0, 2, 5]
    assert len(batch.inputs["input_ids"]) == 5
    assert len({mask.shape[1] for mask in batch.row_masks}) == len(batch.row_masks)
    prediction = loaded.task.predict(loaded.model, batch)
    assert prediction.targets is not None
    assert prediction.targets.tolist() == [1, 1]
    assert prediction.logits[0, 2] == -float("inf")
    for row, found in zip(ROWS, prediction.logits, strict=True):
        for choice, value in zip(row["choices"], found, strict=False):
            expected = score(loaded.model, tokenizer, row["input"], choice, length_normalize)
            torch.testing.assert_close(value, expected)
    prediction.losses().sum().backward()
    gradients = [p.grad for p in loaded.model.parameters() if p.grad is not None]
    assert gradients
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": ["c"]}, "'choices': expected at least two, found 1"),
        ({"choices": "c d"}, "'choices': expected a list"),
        ({"label": 2}, "label 2 is out of range; expected a choice from 0 to 1"),
        ({"label": "x"}, "label 'x' is no choice; there is c, d e f"),
        ({"label": 0.5}, "or the name of a choice, found float 0.5"),
        ({"choices": ["c", "c"], "label": "c"}, "label 'c' is several choices"),
    ],
)
def test_wrong_rows(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(MODELS["t5"](), tmp_path / "m", make_tokenizer(begin=False))
    task = load_model(folder, TaskFile(task="multiple_choice")).task
    with pytest.raises(DataError, match=message):
        task.encode(ROWS[0] | change, 0)


def test_labels_by_number_in_text_and_without(tmp_path: Path) -> None:
    folder = save(MODELS["llama"](), tmp_path / "m", make_tokenizer(begin=False))
    task = load_model(folder, TaskFile(task="multiple_choice")).task
    assert task.encode(ROWS[0] | {"label": "1"}, 0).label == 1
    assert task.encode(ROWS[0] | {"choices": ["1", "0"], "label": "1"}, 0).label == 0
    task = load_model(folder, TaskFile(task="multiple_choice"), need_targets=False).task
    batch = task.collate([task.encode({"input": "a", "choices": ["b", "c"]}, 0)]).to("cpu")
    assert batch.targets is None
