"""Scores against plain loops: one example at a time, transformers called directly."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import (
    bert_config,
    clip_config,
    llama_config,
    make_tokenizer,
    save,
    t5_config,
    vit_config,
    write_rows,
)
from torch import Tensor
from torch.nn.functional import normalize
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    CLIPModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    ViTForImageClassification,
)

from matsmerge.data.rows import Data
from matsmerge.errors import DataError, NonFiniteError
from matsmerge.lab.evaluation.outcome import Outcome
from matsmerge.lab.evaluation.task_evaluation import evaluate_task, resolve_head
from matsmerge.progress import Callback, Update
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.task_file import TaskFile

SENTENCES = ["a b c", "d", "e f g h", "b a", "c c d a e", "k", "l m", "n a o p b c d"]
LABELS = [0, 2, 1, 1, 0, 2, 0, 1]


def load(folder: Path, file: TaskFile, head: Path | str | None = None) -> LoadedModel:
    return load_model(folder, file, head=head)


def agree(outcome: Outcome, logits: list[Tensor], targets: list[Any]) -> None:
    """Probabilities, predictions, losses and accuracy are those of these logits."""
    assert [answer.number for answer in outcome.answers] == list(range(len(targets)))
    right: list[bool] = []
    for answer, scores, target in zip(outcome.answers, logits, targets, strict=True):
        assert answer.target == target
        assert answer.probabilities is not None
        assert answer.probabilities.dtype == np.float32
        np.testing.assert_allclose(answer.probabilities, scores.softmax(-1).numpy(), atol=1e-6)
        assert answer.prediction == scores.argmax(-1).tolist()
        rows, wanted = torch.atleast_2d(scores), torch.atleast_1d(torch.tensor(target))
        loss = -rows.log_softmax(-1).gather(1, wanted[:, None]).sum()
        assert answer.loss == pytest.approx(float(loss), rel=1e-5, abs=1e-5)
        right += (rows.argmax(-1) == wanted).tolist()
    assert outcome.score("accuracy").value == pytest.approx(np.mean(right))
    losses = [answer.loss for answer in outcome.answers if answer.loss is not None]
    assert outcome.score("loss").value == pytest.approx(np.mean(losses))


@pytest.mark.parametrize("batch_size", [1, 3, 32])
@torch.no_grad()
def test_text_classification(batch_size: int, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    model = BertForSequenceClassification(bert_config(num_labels=3)).double()
    folder = save(model, tmp_path / "m", tokenizer)
    rows = [{"text": t, "label": y} for t, y in zip(SENTENCES, LABELS, strict=True)]
    file = TaskFile(name="x", task="sequence_classification")
    data = write_rows(tmp_path / "d.jsonl", rows)
    outcome = evaluate_task(load(folder, file), data, file, batch_size=batch_size)
    agree(outcome, [model(**tokenizer(t, return_tensors="pt")).logits[0] for t in SENTENCES], LABELS)  # fmt: skip
    assert (outcome.task, outcome.kind, outcome.data) == ("x", file.task, data.fingerprint)


@torch.no_grad()
def test_words(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    model = BertForTokenClassification(bert_config(num_labels=3)).double()
    folder = save(model, tmp_path / "m", tokenizer)
    rows = [{"tokens": t.split(), "labels": [i % 3 for i in range(len(t.split()))]} for t in SENTENCES]  # fmt: skip
    file = TaskFile(name="x")
    outcome = evaluate_task(load(folder, file), write_rows(tmp_path / "d.jsonl", rows), file)
    # Words are one token each, between <s> and </s>.
    logits = [model(**tokenizer(t, return_tensors="pt")).logits[0, 1:-1] for t in SENTENCES]
    agree(outcome, logits, [row["labels"] for row in rows])


def pictures(tmp_path: Path) -> tuple[Data, Tensor, list[int]]:
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (6, 8, 8, 3), generator=g)
    labels = [0, 1, 2, 0, 1, 2]
    rows = [{"image": p.tolist(), "label": y} for p, y in zip(pixels, labels, strict=True)]
    data = write_rows(tmp_path / "d.jsonl", rows)
    return data, (pixels.double() / 255 - 0.5).permute(0, 3, 1, 2) / 0.5, labels


@torch.no_grad()
def test_images(tmp_path: Path) -> None:
    model = ViTForImageClassification(vit_config(num_labels=3)).double()
    folder = save(model, tmp_path / "m")
    data, pixels, labels = pictures(tmp_path)
    file = TaskFile(name="x", task="image_classification")
    outcome = evaluate_task(load(folder, file), data, file, batch_size=4)
    agree(outcome, [model(pixel_values=p[None].float().double()).logits[0] for p in pixels], labels)


@torch.no_grad()
def test_clip_with_a_plain_head(tmp_path: Path) -> None:
    model = CLIPModel(clip_config()).double()
    folder = save(model, tmp_path / "m")
    weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (folder / "heads").mkdir()
    save_file({"weight": weight}, folder / "heads" / "x.safetensors")
    data, pixels, labels = pictures(tmp_path)
    file = TaskFile(name="x", task="image_classification")
    outcome = evaluate_task(
        load(folder, file, resolve_head(folder, file)), data, file, batch_size=4
    )
    logits = []
    for p in pixels:
        pooled = model.vision_model(pixel_values=p[None].float().double()).pooler_output
        embedding = normalize(model.visual_projection(pooled), dim=-1)[0]
        logits.append(model.logit_scale.exp() * weight @ embedding)
    agree(outcome, logits, labels)


@torch.no_grad()
def test_the_head_of_a_merge_is_used_by_itself(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    folder = save(BertModel(bert_config()).double(), tmp_path / "m", tokenizer)
    (folder / "heads").mkdir()
    g = torch.Generator().manual_seed(3)
    for name, num in (("two", 2), ("three", 3)):
        head = {
            "classifier.weight": torch.randn(num, 16, generator=g, dtype=torch.float64),
            "classifier.bias": torch.randn(num, generator=g, dtype=torch.float64),
        }
        save_file(head, folder / "heads" / f"{name}.safetensors")
        labels = [y % num for y in LABELS]
        rows = [{"text": t, "label": y} for t, y in zip(SENTENCES, labels, strict=True)]
        file = TaskFile(name=name, task="sequence_classification")
        found = resolve_head(folder, file)
        assert found == str(folder / "heads" / f"{name}.safetensors")
        outcome = evaluate_task(
            load(folder, file, found), write_rows(tmp_path / "d.jsonl", rows), file
        )
        encoder = BertModel.from_pretrained(folder)
        logits = [
            head["classifier.weight"] @ encoder(**tokenizer(t, return_tensors="pt")).pooler_output[0]
            + head["classifier.bias"]
            for t in SENTENCES
        ]  # fmt: skip
        agree(outcome, logits, labels)


def test_which_head(tmp_path: Path) -> None:
    file = TaskFile(name="sst2", task="sequence_classification")
    assert resolve_head(tmp_path, file) is None
    (tmp_path / "heads").mkdir()
    for name in ("rte", "mnli"):
        (tmp_path / "heads" / f"{name}.safetensors").touch()
    with pytest.raises(DataError, match="no head for the task 'sst2', only for mnli, rte"):
        resolve_head(tmp_path, file)
    own = file.model_copy(update={"head": "elsewhere.safetensors"})
    assert resolve_head(tmp_path, own) == "elsewhere.safetensors"
    assert resolve_head(tmp_path, TaskFile(name="sst2", task="multiple_choice")) is None


def own_log_likelihood(model: Any, tokenizer: Any, text: str, answer: str) -> tuple[float, int]:
    """From the mean loss that transformers gives for labels."""
    ids = tokenizer(text)["input_ids"]
    said = [*tokenizer(answer, add_special_tokens=False)["input_ids"], 3]
    if model.config.is_encoder_decoder:
        found = model(input_ids=torch.tensor([ids]), labels=torch.tensor([said]))
    else:
        labels = torch.tensor([[-100] * len(ids) + said])
        found = model(input_ids=torch.tensor([ids + said]), labels=labels)
    return -float(found.loss) * len(said), len(said)


def speaker(name: str, tmp_path: Path) -> tuple[Any, Any, Path]:
    if name == "t5":
        tokenizer = make_tokenizer(begin=False)
        model = T5ForConditionalGeneration(t5_config()).double()
    else:
        tokenizer = make_tokenizer(end=False)
        model = LlamaForCausalLM(llama_config()).double()
    return model, tokenizer, save(model, tmp_path / "m", tokenizer)


@pytest.mark.parametrize("name", ["t5", "llama"])
@pytest.mark.parametrize("length_normalize", [False, True])
@torch.no_grad()
def test_rank_classification(name: str, length_normalize: bool, tmp_path: Path) -> None:
    model, tokenizer, folder = speaker(name, tmp_path)
    choices = ["a b", "c", "d e f g"]
    rows = [
        {"input": t, "choices": choices[: 2 + i % 2], "label": choices[i % 2]}
        for i, t in enumerate(SENTENCES)
    ]
    file = TaskFile(name="x", task="multiple_choice", length_normalize=length_normalize)
    data = write_rows(tmp_path / "d.jsonl", rows)
    logits = []
    for row in rows:
        scores = [
            own_log_likelihood(model, tokenizer, str(row["input"]), c) for c in row["choices"]
        ]
        means = [s / n if length_normalize else s for s, n in scores]
        logits.append(torch.tensor(means, dtype=torch.float64))
    loaded = load(folder, file)
    for batch_size, max_tokens in ((32, 4096), (3, 40), (1, 1)):
        outcome = evaluate_task(loaded, data, file, batch_size=batch_size, max_tokens=max_tokens)
        agree(outcome, logits, [i % 2 for i in range(len(rows))])
    with pytest.raises(DataError, match="'f1' needs choice n to mean the same"):
        evaluate_task(loaded, data, file.model_copy(update={"metrics": ["f1"]}))


@torch.no_grad()
def test_templates(tmp_path: Path) -> None:
    """Each example has one of the wordings, with its own choices."""
    model, tokenizer, folder = speaker("t5", tmp_path)
    rows = [{"s": t, "gold": i % 2} for i, t in enumerate(SENTENCES)]
    file = TaskFile.model_validate(
        {
            "name": "x",
            "task": "multiple_choice",
            "template": [{"text": "a {s}", "choices": ["b", "c"]}, {"text": "{s} d"}],
            "choices": ["e f", "g"],
            "columns": {"label": "gold"},
        }
    )
    outcome = evaluate_task(load(folder, file), write_rows(tmp_path / "d.jsonl", rows), file)
    used = set()
    for row, answer in zip(rows, outcome.answers, strict=True):
        assert answer.probabilities is not None
        found = {}
        for text, choices in ((f"a {row['s']}", ("b", "c")), (f"{row['s']} d", ("e f", "g"))):
            scores = [own_log_likelihood(model, tokenizer, text, c)[0] for c in choices]
            found[choices] = torch.tensor(scores).softmax(0).numpy()
        matching = [c for c, p in found.items() if np.allclose(p, answer.probabilities, atol=1e-6)]
        assert len(matching) == 1
        used.add(matching[0])
    assert len(used) == 2


@pytest.mark.parametrize("name", ["t5", "llama"])
@pytest.mark.parametrize("length_normalize", [False, True])
@torch.no_grad()
def test_losses_of_texts(name: str, length_normalize: bool, tmp_path: Path) -> None:
    model, tokenizer, folder = speaker(name, tmp_path)
    rows = [{"input": t, "target": t[::-1]} for t in SENTENCES]
    file = TaskFile(name="x", length_normalize=length_normalize)
    outcome = evaluate_task(load(folder, file), write_rows(tmp_path / "d.jsonl", rows), file)
    expected = []
    for row in rows:
        total, num = own_log_likelihood(model, tokenizer, row["input"], row["target"])
        expected.append(-total / num if length_normalize else -total)
    assert outcome.losses().tolist() == pytest.approx(expected, rel=1e-6)
    score = outcome.score("loss")
    assert score.value == pytest.approx(np.mean(expected))
    assert score.error == pytest.approx(np.std(expected, ddof=1) / math.sqrt(len(expected)))


def bert(tmp_path: Path) -> Path:
    model = BertForSequenceClassification(bert_config(num_labels=3))
    return save(model, tmp_path / "m", make_tokenizer())


def test_the_first_examples_and_progress(tmp_path: Path) -> None:
    rows = [{"text": t, "label": y} for t, y in zip(SENTENCES, LABELS, strict=True)]
    file = TaskFile(name="x")
    loaded = load(bert(tmp_path), file)

    updates: list[Update] = []
    data = write_rows(tmp_path / "d.jsonl", rows)
    some = evaluate_task(
        loaded, data, file, num_examples=3, batch_size=2, progress=Callback(updates.append)
    )
    assert (len(some), updates[-1].done) == (3, 3)
    assert some.data == write_rows(tmp_path / "e.jsonl", rows[:3]).fingerprint != data.fingerprint
    with pytest.raises(DataError, match="at least 1, found 0"):
        evaluate_task(loaded, data, file, num_examples=0)


def test_gradients_and_dropout_are_off(tmp_path: Path) -> None:
    file = TaskFile(name="x")
    loaded = load(bert(tmp_path), file)
    data = write_rows(tmp_path / "d.jsonl", [{"text": "a b", "label": 0}] * 2)
    loaded.model.train()
    first, second = evaluate_task(loaded, data, file).answers
    assert first.loss == second.loss
    assert not loaded.model.training
    assert all(parameter.grad is None for parameter in loaded.model.parameters())


def test_nan_is_no_score(tmp_path: Path) -> None:
    file = TaskFile(name="x")
    loaded = load(bert(tmp_path), file)
    with torch.no_grad():
        next(loaded.model.parameters()).fill_(math.nan)
    data = write_rows(tmp_path / "d.jsonl", [{"text": "a b", "label": 0}])
    with pytest.raises(NonFiniteError, match="the loss of row 1 of the task x is nan"):
        evaluate_task(loaded, data, file)


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"text": "a", "label": 3}, {}, "row 2: label 3 is out of range"),
        ({"text": "a", "label": "good"}, {"labels": ["bad", "fair", "great"]}, "'good' is no class"),
        ({"text": "a", "gold": 0}, {"columns": {"label": "golden"}}, "no column 'golden'"),
        ({"text": "a", "label": 0}, {"template": "{txt}"}, "no column 'txt', which the template names"),
        ({"text": "a", "label": 0}, {"metrics": ["loss", "bleu"]}, "no metric 'bleu'"),
        ({"text": "a", "label": 0}, {"generate": 3}, "generate is for seq2seq and causal_lm"),
    ],
)  # fmt: skip
def test_what_is_wrong(
    row: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = TaskFile.model_validate({"name": "x", **settings})
    loaded = load(bert(tmp_path), file)
    first = {"text": "a", "label": 0, "gold": 0}
    if "labels" in settings:
        first["label"] = "bad"
    data = write_rows(tmp_path / "d.jsonl", [first, row])
    loaded.model.forward = None  # type: ignore[assignment]  # it is not run
    with pytest.raises(DataError, match=message):
        evaluate_task(loaded, data, file)
