"""Encoders whose head is in a file of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import bert_config, clip_config, make_tokenizer, save, vit_config, write_rows
from torch.nn.functional import normalize
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    CLIPModel,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    ResNetConfig,
    ResNetModel,
    ViTForImageClassification,
    ViTModel,
)

from matsmerge.errors import DataError
from matsmerge.models.heads import EncoderWithHead
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.task import encode_all
from matsmerge.tasks.task_file import TaskFile

CASES: dict[str, tuple[Any, Any, Any]] = {
    "sequence_classification": (BertModel, BertForSequenceClassification, bert_config),
    "token_classification": (BertModel, BertForTokenClassification, bert_config),
    "image_classification": (ViTModel, ViTForImageClassification, vit_config),
}


def check_names(loaded: LoadedModel, head: Path) -> None:
    parameters = dict(loaded.model.named_parameters())
    tensors = load_file(head)
    for name, stored in loaded.names.items():
        assert torch.equal(parameters[name], loaded.checkpoint[stored]), name
    for name, stored in loaded.head_names.items():
        assert torch.equal(parameters[name], tensors[stored]), name
    assert {*loaded.names} | {*loaded.head_names} == set(parameters)
    assert not {*loaded.names} & {*loaded.head_names}
    assert {*loaded.head_names.values()} == set(tensors)
    assert all(p.requires_grad for p in parameters.values())


def split(folder: Path, kind: str, num_labels: int = 5) -> tuple[Path, Path, Any]:
    """An encoder's folder, the file of a head, and the whole model."""
    encoder_class, model_class, config = CASES[kind]
    whole = model_class(config(num_labels=num_labels))
    save(whole, folder / "whole")
    state = whole.state_dict()
    prefix = whole.base_model_prefix + "."
    encoder = encoder_class(config())
    missing = encoder.load_state_dict(
        {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}, strict=False
    )
    assert all("pooler" in name for name in missing.missing_keys)
    encoder.save_pretrained(folder / "encoder")
    make_tokenizer().save_pretrained(folder / "encoder")
    head = {k: v for k, v in state.items() if not k.startswith(prefix)}
    save_file(head, folder / "head.safetensors")
    return folder / "encoder", folder / "head.safetensors", whole.eval()


@pytest.mark.parametrize("kind", CASES)
def test_an_encoder_and_a_head_are_the_model(kind: str, tmp_path: Path) -> None:
    encoder, head, whole = split(tmp_path, kind)
    loaded = load_model(encoder, TaskFile(task=kind), head=head)
    assert loaded.task.kind == kind
    assert loaded.head_names == {name: name for name in ("classifier.weight", "classifier.bias")}
    check_names(loaded, head)
    if kind == "image_classification":
        inputs: dict[str, Any] = {"pixel_values": torch.randn(2, 3, 8, 8)}
    else:
        inputs = {"input_ids": torch.tensor([[2, 4, 5, 3]])}
    torch.testing.assert_close(loaded.model(**inputs).logits, whole(**inputs).logits)


def test_parameters_beside_the_classifier(tmp_path: Path) -> None:
    """A pooler of the task's own goes with the head, with the encoder's prefix or without."""
    encoder, head, _ = split(tmp_path, "sequence_classification")
    pooler = {"bert.pooler.dense.weight": torch.randn(16, 16)}
    for prefix in ("bert.", ""):
        renamed = {name.replace("bert.", prefix): value for name, value in pooler.items()}
        save_file(load_file(head) | renamed, tmp_path / "more.safetensors")
        loaded = load_model(
            encoder, TaskFile(task="sequence_classification"), head=tmp_path / "more.safetensors"
        )
        assert "bert.pooler.dense.weight" in loaded.head_names
        check_names(loaded, tmp_path / "more.safetensors")


def test_the_file_wins_over_the_models_own_head(tmp_path: Path) -> None:
    _, head, _ = split(tmp_path, "sequence_classification")
    other = save(
        BertForSequenceClassification(bert_config(num_labels=3)),
        tmp_path / "o",
        make_tokenizer(),
        seed=1,
    )
    loaded = load_model(other, head=head)
    assert set(loaded.head_names) == {"classifier.weight", "classifier.bias"}
    check_names(loaded, head)
    row = {"text": "a", "label": 4}
    assert loaded.task.encode(row, 0).label == 4


def test_wrong_heads(tmp_path: Path) -> None:
    encoder, head, _ = split(tmp_path, "sequence_classification")
    state = load_file(head)
    wrong = tmp_path / "wrong.safetensors"
    save_file(state | {"score.weight": torch.ones(2, 2)}, wrong)
    with pytest.raises(
        DataError, match="'score.weight' is no parameter of BertForSequenceClassification"
    ):
        load_model(encoder, TaskFile(task="sequence_classification"), head=wrong)
    save_file(state | {"classifier.weight": torch.ones(5, 7)}, wrong)
    with pytest.raises(DataError, match=r"'classifier.weight' is \[5, 7\], .* expects \[5, 16\]"):
        load_model(encoder, TaskFile(task="sequence_classification"), head=wrong)
    save_file({"classifier.bias": state["classifier.bias"]}, wrong)
    with pytest.raises(DataError, match=r"needs 'classifier.weight', which would be random"):
        load_model(encoder, TaskFile(task="sequence_classification"), head=wrong)


def test_rounding_is_noted(tmp_path: Path) -> None:
    encoder, head, _ = split(tmp_path, "sequence_classification")
    BertModel.from_pretrained(encoder).bfloat16().save_pretrained(encoder)
    loaded = load_model(encoder, TaskFile(task="sequence_classification"), head=head)
    (note,) = loaded.notes
    assert "rounded to the model's bfloat16" in note
    save_file({"weight": torch.ones(3, 16)}, head)
    assert "rounded" in load_model(encoder, head=head).notes[-1]


def image_inputs(loaded: LoadedModel, tmp_path: Path) -> Any:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3))
    rows = [{"image": image.tolist(), "label": n} for n, image in enumerate(pixels)]
    return loaded.task.collate(encode_all(loaded.task, write_rows(tmp_path / "d.jsonl", rows)))


@pytest.mark.parametrize("source", ["clip", "with_projection"])
def test_zero_shot_heads(source: str, tmp_path: Path) -> None:
    clip = CLIPModel(clip_config())
    folder = save(clip, tmp_path / "clip")
    if source == "with_projection":
        config = clip.config.vision_config
        config.projection_dim = 8
        tower = CLIPVisionModelWithProjection(config)
        tower.load_state_dict(clip.state_dict(), strict=False)
        tower.save_pretrained(tmp_path / "tower")
        folder = tmp_path / "tower"
    weight = torch.randn(4, 8)
    head = tmp_path / "head.safetensors"
    save_file({"weight": weight}, head)
    loaded = load_model(folder, head=head)
    assert isinstance(loaded.model, EncoderWithHead)
    assert loaded.task.kind == "image_classification"
    batch = image_inputs(loaded, tmp_path)
    with torch.no_grad():
        vision = clip.vision_model(pixel_values=batch.inputs["pixel_values"]).pooler_output
        features = normalize(clip.visual_projection(vision), dim=-1)
        if source == "clip":
            features = features * clip.logit_scale.exp()
    found = loaded.task.predict(loaded.model, batch).logits
    torch.testing.assert_close(found, features @ weight.T)
    check_names(loaded, head)
    assert ("logit_scale" in loaded.names.values()) == (source == "clip")
    assert loaded.names["encoder.visual_projection.weight"] == "visual_projection.weight"
    assert any("text_model" in note for note in loaded.notes) == (source == "clip")


@pytest.mark.parametrize("source", ["clip", "vision"])
def test_heads_on_the_hidden_state(source: str, tmp_path: Path) -> None:
    clip = CLIPModel(clip_config())
    folder = save(clip, tmp_path / "clip")
    if source == "vision":
        tower = CLIPVisionModel(clip.config.vision_config)
        tower.load_state_dict(
            {k.removeprefix("vision_model."): v for k, v in clip.state_dict().items()}, strict=False
        )
        tower.save_pretrained(tmp_path / "tower")
        folder = tmp_path / "tower"
    weight, bias = torch.randn(4, 16), torch.randn(4)
    head = tmp_path / "head.safetensors"
    save_file({"weight": weight, "bias": bias}, head)
    loaded = load_model(folder, TaskFile(labels=list("wxyz")), head=head)
    batch = image_inputs(loaded, tmp_path)
    with torch.no_grad():
        pooled = clip.eval().vision_model(pixel_values=batch.inputs["pixel_values"]).pooler_output
    torch.testing.assert_close(
        loaded.task.predict(loaded.model, batch).logits, pooled @ weight.T + bias
    )
    check_names(loaded, head)
    prefix = "vision_model." if source == "clip" else ""
    key = "encoder.layers.1.self_attn.q_proj.weight"
    assert loaded.names[f"encoder.{key}"] == prefix + key


def test_plain_heads_on_other_encoders(tmp_path: Path) -> None:
    head = tmp_path / "head.safetensors"
    save_file({"weight": torch.randn(3, 16), "bias": torch.randn(3)}, head)
    bert = load_model(
        save(BertModel(bert_config()), tmp_path / "bert", make_tokenizer()), head=head
    )
    assert bert.task.kind == "sequence_classification"
    check_names(bert, head)
    batch = bert.task.collate([bert.task.encode({"text": "a b", "label": 2}, 0)])
    assert bert.task.predict(bert.model, batch).logits.shape == (1, 3)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    resnet = load_model(save(ResNetModel(config), tmp_path / "resnet"), head=head)
    check_names(resnet, head)
    assert resnet.model(pixel_values=torch.zeros(1, 3, 32, 32)).logits.shape == (1, 3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"weight": torch.ones(4, 9)},
            r"'weight' is \[4, 9\], expected a second size of 16.* or 8, of",
        ),
        ({"weight": torch.ones(4)}, r"expected 'weight' \(classes, size\)"),
        ({"weight": torch.ones(4, 8), "bias": torch.ones(3)}, r"'bias' is \[3\], expected \[4\]"),
    ],
)
def test_wrong_plain_heads(tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(CLIPModel(clip_config()), tmp_path / "clip")
    save_file(tensors, tmp_path / "head.safetensors")
    with pytest.raises(DataError, match=message):
        load_model(folder, head=tmp_path / "head.safetensors")
