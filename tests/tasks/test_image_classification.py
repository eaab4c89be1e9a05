import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import clip_config, save, vit_config, write_rows
from torch.nn.functional import cross_entropy
from transformers import (
    CLIPForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from matsmerge.data.rows import read_data
from matsmerge.errors import DataError
from matsmerge.optional_import import import_optional
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task import encode_all
from matsmerge.tasks.task_file import TaskFile


def random_image(seed: int, size: tuple[int, int] = (12, 10)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(ViTForImageClassification(vit_config(num_labels=3)), tmp_path_factory.mktemp("vit"))


def expected_pixels(image: Image.Image, size: int) -> torch.Tensor:
    resized = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
    return torch.from_numpy(resized.astype(np.float32) / 127.5 - 1).permute(2, 0, 1)


def test_every_way_to_give_an_image(vit: Path, tmp_path: Path) -> None:
    image = random_image(0)
    (tmp_path / "x.png").write_bytes(png(image))
    array = np.asarray(image)
    task = load_model(vit).task
    assert "no preprocessor_config.json; images are resized to 8 x 8" in task.notes[0]
    values: list[Any] = [
        image,
        png(image),
        {"bytes": png(image), "path": None},
        array,
        array.tolist(),
        array.transpose(2, 0, 1),
        tmp_path / "x.png",
    ]
    examples = [task.encode({"image": value, "label": 1}, n) for n, value in enumerate(values)]
    data = write_rows(tmp_path / "d.jsonl", [{"image": "x.png", "label": 1}])
    examples += encode_all(task, data)
    assert {example.length for example in examples} == {5}
    batch = task.collate(examples)
    for pixels in batch.inputs["pixel_values"]:
        torch.testing.assert_close(pixels, expected_pixels(image, 8))
    assert batch.row_masks == ()


def test_losses(vit: Path, tmp_path: Path) -> None:
    loaded = load_model(vit)
    images = [random_image(n) for n in range(3)]
    examples = [loaded.task.encode({"image": i, "label": n}, n) for n, i in enumerate(images)]
    losses = loaded.task.predict(loaded.model, loaded.task.collate(examples)).losses()
    for n, image in enumerate(images):
        logits = loaded.model(pixel_values=expected_pixels(image, 8)[None]).logits[0]
        torch.testing.assert_close(losses[n], cross_entropy(logits, torch.tensor(n)))


def test_grey_images_and_half_precision(tmp_path: Path) -> None:
    folder = save(ViTForImageClassification(vit_config(num_channels=1)).bfloat16(), tmp_path / "m")
    loaded = load_model(folder)
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    batch = loaded.task.collate([loaded.task.encode({"image": grey, "label": 0}, 0)])
    pixels = batch.inputs["pixel_values"]
    assert pixels.dtype == torch.bfloat16
    torch.testing.assert_close(pixels[0, 0], (torch.from_numpy(grey) / 127.5 - 1).bfloat16())
    assert loaded.task.predict(loaded.model, batch).losses().isfinite().all()


def test_the_models_own_processor(tmp_path: Path) -> None:
    folder = save(ViTForImageClassification(vit_config()), tmp_path / "m")
    settings = {
        "size": {"height": 8, "width": 8},
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [1.0, 2.0, 3.0],
    }
    processor = ViTImageProcessorPil(**settings)
    processor.save_pretrained(folder)
    task = load_model(folder).task
    assert task.notes == []
    image = random_image(0)
    batch = task.collate([task.encode({"image": image, "label": 0}, 0)])
    expected = processor(images=image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(batch.inputs["pixel_values"], expected)
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(DataError, match="the image processor cannot be read"):
        load_model(folder)


def test_resnet(tmp_path: Path) -> None:
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3, layer_type="basic"
    )
    loaded = load_model(save(ResNetForImageClassification(config), tmp_path / "m"))
    assert "224 x 224" in loaded.task.notes[0]
    batch = loaded.task.collate([loaded.task.encode({"image": random_image(1), "label": 2}, 0)])
    assert batch.inputs["pixel_values"].shape == (1, 3, 224, 224)
    logits = loaded.model(pixel_values=expected_pixels(random_image(1), 224)[None]).logits
    loss = loaded.task.predict(loaded.model, batch).losses()
    torch.testing.assert_close(loss, cross_entropy(logits, torch.tensor([2]), reduction="none"))
    assert len(loaded.names) == len(list(loaded.model.parameters()))


def test_models_that_see_text_too(tmp_path: Path) -> None:
    loaded = load_model(save(CLIPForImageClassification(clip_config(num_labels=3)), tmp_path / "m"))
    batch = loaded.task.collate([loaded.task.encode({"image": random_image(1), "label": 2}, 0)])
    assert batch.inputs["pixel_values"].shape == (1, 3, 8, 8)
    assert loaded.task.predict(loaded.model, batch).logits.shape == (1, 3)


def test_image_folders_and_datasets(vit: Path, tmp_path: Path) -> None:
    datasets = import_optional("datasets")

    datasets.disable_progress_bars()
    for n, name in enumerate(("cat", "dog", "owl")):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "0.png").write_bytes(png(random_image(n)))
    task = load_model(vit, TaskFile(labels=["cat", "dog", "owl"])).task
    pixels = torch.stack([expected_pixels(random_image(n), 8) for n in range(3)])
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = [{"image": random_image(n), "label": n} for n in range(3)]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    for name in ("images", "saved"):
        data = read_data(tmp_path / name)
        batch = task.collate(encode_all(task, data))
        assert batch.targets is not None
        assert batch.targets.tolist() == [0, 1, 2]
        torch.testing.assert_close(batch.inputs["pixel_values"], pixels)
    assert data.fingerprint == read_data(tmp_path / "saved").fingerprint


@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname", "link.png", "a\0b.png"])
def test_paths_never_lead_out_of_the_folder(name: str, vit: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(png(random_image(0)))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret.png")
    task = load_model(vit).task
    for value in (name, {"bytes": None, "path": name}):
        data = write_rows(tmp_path / "data" / "d.jsonl", [{"image": value, "label": 0}])
        with pytest.raises(DataError, match=r"(?s)row 1: image .*expected a path inside"):
            encode_all(task, data)
        hidden = {"image": "gone.png", "label": 0}
        assert data.fingerprint != write_rows(tmp_path / "data" / "e.jsonl", [hidden]).fingerprint


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("none.png", "none.png: no such file"),
        (b"not an image", "image of 12 bytes: not a readable image"),
        ([[0.5]], "whole numbers from 0 to 255, found float64"),
        ([[256]], "whole numbers from 0 to 255"),
        ([1, 2], r"\(height, width\) or \(height, width, 3\), found \[2\]"),
        ([[1], [1, 2]], "rows of different sizes"),
        (5, "expected a path, bytes, an image of PIL or an array, found int 5"),
        (None, "found null"),
    ],
)
def test_what_is_no_image(value: Any, message: str, vit: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"label": 0}])
    data.columns.append("image")
    data.rows[0]["image"] = value  # type: ignore[index]
    with pytest.raises(DataError, match="row 1: .*" + message):
        encode_all(load_model(vit).task, data)


def test_damage_that_shows_late(vit: Path) -> None:
    task = load_model(vit).task
    buffer = io.BytesIO()
    random_image(0, (64, 64)).save(buffer, "JPEG")
    example = task.encode({"image": buffer.getvalue()[:-500], "label": 0}, 4)
    with pytest.raises(DataError, match="row 5: image of .* not a readable image"):
        task.collate([example])


def test_labels_need_not_be_there(vit: Path) -> None:
    task = load_model(vit, need_targets=False).task
    batch = task.collate([task.encode({"image": random_image(0)}, 0)])
    assert batch.targets is None
    assert json.dumps(batch.examples) == "[0]"
