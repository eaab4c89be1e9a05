"""A small vision transformer, pre-trained here on images that are in no task.

Photographs of animals (CIFAR-10) and drawings of things that no task asks for (Quick, Draw!), all
told apart at once.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from matsmerge.lab.experiments.sources import cifar10, quickdraw
from matsmerge.lab.experiments.sources.images import SIZE, with_margin
from matsmerge.models.pretrained import quiet
from matsmerge.optional_import import import_optional

_PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": SIZE, "width": SIZE},
    "resample": 2,  # bilinear
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_LEARNING_RATE = 1.5e-3


def small_vit(folder: Path, *, num_steps: int = 2500, batch_size: int = 64, seed: int = 0) -> None:
    """The model folder, with its image processor."""
    transformers = import_optional("transformers")
    images, labels, names = _mixture()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.ViTConfig(
            image_size=SIZE,
            patch_size=8,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            initializer_range=0.08,  # about 1 / sqrt(hidden_size)
            id2label=dict(enumerate(names)),
            label2id={name: n for n, name in enumerate(names)},
        )
        model = transformers.ViTForImageClassification(config)
        # As large as what patches are mapped to: where a line is matters from the first step on.
        torch.nn.init.normal_(model.vit.embeddings.position_embeddings, std=0.7)
        _train(model, images, labels, num_steps, batch_size)
    with quiet():
        model.eval().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR, indent=2) + "\n")


def _mixture() -> tuple[Tensor, Tensor, list[str]]:
    """Images (images, 3, 32, 32) as bytes, their classes as numbers, and the classes' names."""
    photographs, animals = cifar10.read_photographs(cifar10.ANIMALS, cifar10.NUM_BATCHES)
    taken = {*quickdraw.ANIMALS, *quickdraw.FOOD}
    drawings, things = quickdraw.read_drawings(lambda thing: thing not in taken)
    in_colour = np.repeat(with_margin(drawings)[..., None], 3, axis=-1)
    images = torch.from_numpy(np.concatenate([photographs, in_colour])).permute(0, 3, 1, 2)
    labels = [*(f"photograph of {a}" for a in animals), *(f"drawing of {t}" for t in things)]
    names = sorted(set(labels))
    numbers = {name: n for n, name in enumerate(names)}
    return images.contiguous(), torch.tensor([numbers[label] for label in labels]), names


def _train(model: Any, images: Tensor, labels: Tensor, num_steps: int, batch_size: int) -> None:
    """AdamW, the learning rate up for a tenth of the steps and then down to nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _LEARNING_RATE, total_steps=num_steps, pct_start=0.1
    )
    model.train()
    order = torch.empty(0, dtype=torch.long)
    for _ in range(num_steps):
        if len(order) < batch_size:
            order = torch.randperm(len(images))
        batch, order = order[:batch_size], order[batch_size:]
        pixels = images[batch].float() / 127.5 - 1  # as `_PROCESSOR` has it
        loss = cross_entropy(model(pixel_values=pixels).logits, labels[batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
