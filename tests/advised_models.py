"""A tiny text encoder and classifiers made of it: sure ones, and poor ones; nothing is trained."""

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_models import bert_config, make_tokenizer
from transformers import BertForSequenceClassification, BertModel

TEXTS = [" ".join(random.Random(i).choices("abcdefghijklmnop", k=5)) for i in range(40)]


@dataclass(frozen=True)
class Family:
    """A base, models, and data of each without labels."""

    base: Path
    models: list[Path]
    data: list[Path]

    @property
    def flags(self) -> list[object]:
        """How a command is given the models and their base."""
        return [*self.models, "--base", self.base]

    @property
    def data_flags(self) -> list[object]:
        return [flag for path in self.data for flag in ("--data", path)]


def make_family(
    folder: Path,
    poor: Sequence[int] = (),
    fresh: bool = False,
    far: Sequence[int] = (),
    num: int = 3,
) -> Family:
    """Classifiers whose answers vary with the text, but for the poor ones.

    The pooler is learnt from scratch if `fresh`; models that are `far` moved ten times as far.
    """
    torch.manual_seed(0)
    base = BertModel(bert_config()).eval()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    tokenizer = make_tokenizer()
    _save(base, folder / "base", tokenizer)
    models, data = [], []
    for i in range(num):
        model = BertForSequenceClassification(bert_config(num_labels=2 + i % 2)).eval()
        encoder: Any = model.bert
        encoder.load_state_dict(base.state_dict())
        for name, parameter in encoder.named_parameters():
            share = 0.02 * (10 if i in far else 1) * (20 if fresh and "pooler" in name else 1)
            _move(parameter, share)
        _set_head(model, tokenizer, is_poor=i in poor)
        models.append(_save(model, folder / f"m{i}", tokenizer))
        data.append(write_texts(folder / f"m{i}.jsonl"))
    return Family(folder / "base", models, data)


def write_texts(path: Path, labels: Sequence[Any] | None = None) -> Path:
    rows: list[dict[str, Any]] = [{"text": text} for text in TEXTS]
    for row, label in zip(rows, labels or [], strict=False):
        row["label"] = label
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _move(parameter: Any, share: float) -> None:
    """Move at random, by a share of the norm."""
    step = torch.randn_like(parameter)
    with torch.no_grad():
        parameter.add_(share * (parameter.norm() + 0.1) / step.norm() * step)


def _set_head(model: Any, tokenizer: Any, *, is_poor: bool) -> None:
    """A head that tells texts apart, or one that has an answer for all of them."""
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        pooled = model.bert(**inputs).pooler_output
        weight = torch.randn_like(model.classifier.weight)
        weight *= 4 / (pooled - pooled.mean(0)).matmul(weight.mT).std()
        model.classifier.weight.copy_(weight * (0.01 if is_poor else 1))
        model.classifier.bias.copy_(-model.classifier.weight @ pooled.mean(0))
        model.classifier.bias[0] += 2.0 if is_poor else 0.0


def answers_of(model: Path, texts: Sequence[str] = TEXTS) -> torch.Tensor:
    """Probabilities (texts, classes) by transformers, a text at a time, in float64."""
    loaded: Any = copy.deepcopy(BertForSequenceClassification.from_pretrained(model)).double()
    tokenizer = make_tokenizer()
    with torch.no_grad():
        rows = [loaded.eval()(**tokenizer(t, return_tensors="pt")).logits[0] for t in texts]
    return torch.stack(rows).softmax(-1)


def _save(model: Any, folder: Path, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
