"""`mats tune --unlabelled`: chosen is what answers most like each task's own model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_models import bert_config, make_tokenizer, save, write_rows
from transformers import AutoTokenizer, BertForSequenceClassification

from matsmerge.lab.tuning.teacher_score import divergences

Run = Callable[..., tuple[int, str, str]]

NAMES = ("one", "two")
WORDS = "abcdefgh"


@pytest.fixture
def setting(tmp_path: Path) -> Path:
    """Two fine-tuned models, their base and task files, whose rows have no labels."""
    base = BertForSequenceClassification(bert_config(num_labels=3))
    save(base, tmp_path / "base", make_tokenizer())
    for i, name in enumerate(NAMES):
        model = BertForSequenceClassification.from_pretrained(tmp_path / "base")
        save(model, tmp_path / name, make_tokenizer(), seed=i + 1)
        g = torch.Generator().manual_seed(i)
        rows = [
            {"text": " ".join(WORDS[int(w)] for w in torch.randint(0, 8, (4,), generator=g))}
            for _ in range(30)
        ]
        write_rows(tmp_path / f"{name}-train.jsonl", rows[:10])
        write_rows(tmp_path / f"{name}-validation.jsonl", rows[10:])
        data = {split: f"{name}-{split}.jsonl" for split in ("train", "validation")}
        content = {"task": "sequence_classification", "data": data}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def tune(mats: Run, folder: Path, *more: Any, **recipe: Any) -> tuple[int, str, str]:
    content = {
        "models": [str(folder / name) for name in NAMES],
        "base": str(folder / "base"),
        "method": "task_arithmetic",
        "heads": "classifier.*",
        **recipe,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    tasks = [part for name in NAMES for part in ("--task", folder / f"{name}.yaml")]
    return mats(
        "tune", folder / "recipe.yaml", *tasks, "--unlabelled", "--search", "scale=0,0.5,1",
        "--out", folder / "tuned", "--json", *more,
    )  # fmt: skip


def log_probabilities(folder: Path, rows: Path, head: Path | None = None) -> torch.Tensor:
    """By transformers alone, one example at a time, in float64."""
    model = BertForSequenceClassification.from_pretrained(folder).double().eval()
    if head is not None:
        from safetensors.torch import load_file

        model.load_state_dict(
            {name: value.double() for name, value in load_file(head).items()}, strict=False
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits for text in texts]
    return torch.cat(logits).log_softmax(1)


def test_divergence_is_that_of_torch() -> None:
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, 4, generator=g).log_softmax(1) for _ in range(2))
    expected = torch.nn.functional.kl_div(q.double(), p.double(), reduction="none", log_target=True)
    torch.testing.assert_close(divergences(p, q), expected.sum(1))
    assert divergences(p, p).abs().max() == 0
    # An answer that an example does not have changes nothing.
    absent = torch.full((5, 1), -torch.inf)
    with_absent = divergences(torch.cat([p, absent], 1), torch.cat([q, absent], 1))
    torch.testing.assert_close(with_absent, divergences(p, q))


def test_the_nearest_to_the_models_own_answers(setting: Path, mats: Run) -> None:
    code, out, error = tune(mats, setting)
    assert code == 0, error
    found = json.loads((setting / "tuned" / "tuning.json").read_text())
    assert found["metrics"] == {"one": "divergence", "two": "divergence"}
    by_scale = {trial["choice"]["scale"]: trial["scores"] for trial in found["trials"]}
    for scale, scores in by_scale.items():
        merged = setting / f"scale{scale}"
        models = [part for name in NAMES for part in ("--model", setting / name)]
        code, _, error = mats(
            "merge", "--method", "task_arithmetic", "--scale", scale, "--base", setting / "base",
            *models, "--heads", "classifier.*", "--out", merged, "-q",
        )  # fmt: skip
        assert code == 0, error
        for name in NAMES:
            rows = setting / f"{name}-validation.jsonl"
            own = log_probabilities(setting / name, rows)
            said = log_probabilities(merged, rows, merged / "heads" / f"{name}.safetensors")
            expected = (own.exp() * (own - said)).sum(1).mean()
            # Log-probabilities are computed in float32.
            assert scores[name] == pytest.approx(float(expected), rel=1e-3, abs=1e-6)
    means = {scale: sum(scores.values()) for scale, scores in by_scale.items()}
    assert json.loads(out)["choice"]["scale"] == min(means, key=lambda scale: means[scale])
    left = sorted(path.name for path in (setting / "tuned").iterdir())
    assert left == ["merge.json", "model", "recipe.yaml", "trials.jsonl", "tuning.json"]


def test_labels_are_not_looked_at(setting: Path, mats: Run) -> None:
    assert tune(mats, setting)[0] == 0
    without = json.loads((setting / "tuned" / "tuning.json").read_text())["trials"]
    for name in NAMES:
        path = setting / f"{name}-validation.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_rows(path, [{**row, "label": "no class of the model"} for row in rows])
    code, _, error = tune(mats, setting, "--overwrite")
    assert code == 0, error
    assert json.loads((setting / "tuned" / "tuning.json").read_text())["trials"] == without


def test_a_task_without_a_model_is_refused(setting: Path, mats: Run) -> None:
    models = [{"model": str(setting / name), "name": f"my-{name}"} for name in NAMES]
    code, _, error = tune(mats, setting, models=models)
    assert code != 0
    for name in NAMES:
        assert f"call one so (name: {name}). There are my-one, my-two" in " ".join(error.split())
    assert not (setting / "tuned").exists()
