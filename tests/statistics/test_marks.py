"""How well classifiers answered: counted while statistics are collected, added up, and judged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from prefix_families import merge
from tiny_models import bert_config, make_tokenizer, save, write_rows
from transformers import BertForSequenceClassification

from matsmerge.statistics.marks import Marks, marks_of
from matsmerge.statistics.statistics_file import open_statistics
from matsmerge.statistics.statistics_sum import combine_statistics
from matsmerge.tasks.prediction import Prediction

LABELS = ["a", "b", "c"]


def test_marks_are_what_torch_says() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(40, 3), torch.randint(0, 3, (40,))
    found = marks_of(Prediction(logits[:15], targets[:15])) + marks_of(
        Prediction(logits[15:], targets[15:])
    )
    assert found.num == 40
    assert found.accuracy == pytest.approx(float((logits.argmax(1) == targets).float().mean()))
    assert found.majority == pytest.approx(int(targets.bincount().max()) / 40)
    assert Marks.model_validate_json(found.model_dump_json()) == found


def test_what_has_no_labels_or_is_text_has_none() -> None:
    logits = torch.zeros(2, 3)
    of_tokens = Prediction(logits[:, None], logits[:, :1].long())
    several = Prediction(logits, logits.long())
    unknown = Prediction(logits, torch.tensor([1, -100]))
    results: list[Any] = [Prediction(logits, None), of_tokens, logits[:, 0], (logits, {})]
    results += [several, unknown]
    for result in results:
        assert marks_of(result) == Marks()


@pytest.mark.parametrize(
    ("num", "num_right", "commonest", "is_poor"),
    [
        (100, 90, 50, False),
        (100, 55, 50, True),  # within two standard errors of always the same answer
        (100, 61, 50, False),
        (100, 80, 80, True),
        (10, 4, 5, False),  # too few to say
    ],
)
def test_a_poor_model_is_hardly_better_than_one_answer(
    num: int, num_right: int, commonest: int, is_poor: bool
) -> None:
    labels = {"0": commonest, "1": num - commonest}
    assert Marks(num=num, num_right=num_right, labels=labels).is_poor == is_poor


def make_models(folder: Path, mats: Any) -> list[Path]:
    """Two models, one with labels of its own answers, one with labels at random, and statistics."""
    torch.manual_seed(0)
    made = []
    for i, name in enumerate(("good", "poor")):
        model = BertForSequenceClassification(bert_config(num_labels=3)).double()
        model.classifier.weight.data *= 100  # answers of all kinds
        model.config.id2label = dict(enumerate(LABELS))
        model.config.label2id = {label: n for n, label in enumerate(LABELS)}
        path = save(model, folder / name, make_tokenizer(), seed=i)
        texts = [
            " ".join("abcdefghijklmnop"[j] for j in torch.randint(0, 16, (5,))) for _ in range(60)
        ]
        tokens = make_tokenizer()(texts, return_tensors="pt", padding=True)
        own = BertForSequenceClassification.from_pretrained(path).eval()
        with torch.no_grad():
            answers = own(**tokens).logits.argmax(1)
        if name == "poor":
            answers = torch.randint(0, 3, (60,))
        rows = [{"text": t, "label": LABELS[a]} for t, a in zip(texts, answers, strict=True)]
        write_rows(folder / f"{name}.jsonl", rows)
        code, _, error = mats(
            "collect", path, "--data", folder / f"{name}.jsonl", "--statistics", "kfac",
            "--out", path / "statistics.safetensors",
        )  # fmt: skip
        assert code == 0, error
        made.append(path)
    return made


def test_a_merge_names_the_poor_model_before_it_begins(tmp_path: Path, mats: Any) -> None:
    good, poor = make_models(tmp_path, mats)
    marks = [
        open_statistics(p / "statistics.safetensors").header.sets["main"].marks
        for p in (good, poor)
    ]
    assert marks[0] is not None
    assert (marks[0].num, marks[0].num_right) == (60, 60)
    assert marks[1] is not None
    assert marks[1].num_right < 40
    merge(
        [good, poor], method="mats_kfac", init="average", iterations=1, heads="classifier.*",
        out=tmp_path / "merged",
    )  # fmt: skip
    notes = json.loads((tmp_path / "merged" / "merge.json").read_text())["notes"]
    (note,) = (note for note in notes if "poor model" in note)
    assert note.startswith(
        f"poor is a poor model: of the 60 examples its statistics are of it gets {marks[1].accuracy:.0%}"
    )
    assert "`mats advise` says how much weight" in note
    both = combine_statistics(
        [open_statistics(p / "statistics.safetensors") for p in (good, poor)], force=True
    )
    assert both.header.sets["main"].marks == marks[0] + marks[1]
