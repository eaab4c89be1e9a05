"""Heads made of the names of classes, against CLIP's own zero-shot scores."""

from pathlib import Path

import pytest
import torch
from tiny_models import bert_config, clip_config, make_tokenizer, save, vit_config
from transformers import BertModel, CLIPModel, ViTForImageClassification

from matsmerge.errors import DataError
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task_file import TaskFile

LABELS = ["a b", "c", "d e f"]


def task(**more: object) -> TaskFile:
    content = {"task": "image_classification", "labels": LABELS, "template": "g {label}"}
    return TaskFile.model_validate(content | more)


def test_one_prompt_is_clips_own_score(tmp_path: Path) -> None:
    model = CLIPModel(clip_config()).double()
    folder = save(model, tmp_path / "clip", make_tokenizer())
    loaded = load_model(folder, task())
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    tokens = make_tokenizer()([f"g {name}" for name in LABELS], padding=True, return_tensors="pt")
    expected = model(
        pixel_values=pixels,
        input_ids=tokens["input_ids"],
        attention_mask=tokens["attention_mask"],
    ).logits_per_image
    torch.testing.assert_close(loaded.model(pixel_values=pixels).logits, expected)


def test_several_prompts_are_averaged(tmp_path: Path) -> None:
    model = CLIPModel(clip_config()).double()
    folder = save(model, tmp_path / "clip", make_tokenizer())
    file = task(template=["g {label}", "{label} h"])
    head = load_model(folder, file).model.get_submodule("head")
    rows = []
    for name in LABELS:
        parts = []
        for text in (f"g {name}", f"{name} h"):
            tokens = make_tokenizer()(text, return_tensors="pt")
            found = model.get_text_features(input_ids=tokens["input_ids"])
            found = found if isinstance(found, torch.Tensor) else found.pooler_output
            parts.append(found[0] / found[0].norm())
        mean = torch.stack(parts).mean(0)
        rows.append(mean / mean.norm())
    torch.testing.assert_close(head.get_parameter("weight").detach(), torch.stack(rows).detach())


def test_what_is_refused(tmp_path: Path) -> None:
    clip = save(CLIPModel(clip_config()), tmp_path / "clip", make_tokenizer())
    vit = save(ViTForImageClassification(vit_config(num_labels=3)), tmp_path / "vit")
    bert = save(BertModel(bert_config()), tmp_path / "bert", make_tokenizer())
    for folder, file, message in (
        (vit, task(), "has no text encoder beside its image encoder"),
        (bert, task(), "has no text encoder"),
        (clip, task(labels=None), "needs the classes' names in labels"),
        (clip, task(template="{name}"), "no column 'name', which the template names"),
    ):
        with pytest.raises(DataError, match=message):
            load_model(folder, file)
