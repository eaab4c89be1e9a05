"""Which class is this image?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matsmerge.data.image_files import check_image, image_source, open_image
from matsmerge.data.row_values import value_of
from matsmerge.errors import DataError
from matsmerge.models.pretrained import read_with
from matsmerge.optional_import import import_optional
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.task import Encoded, Task, TaskOptions, has_any

_DEFAULT_SIZE = 224


@dataclass(frozen=True)
class EncodedImage(Encoded):
    """Where an image comes from, and its class; it is decoded when it is needed."""

    source: Any
    label: int | None


class ImageClassification(Task[EncodedImage]):
    """Columns `image` and `label`, a class's number or name.

    An image is a path relative to the data's folder, an image of PIL, the bytes of a file, the
    `{"bytes", "path"}` of the datasets library, or an array (height, width) or with channels.
    """

    kind = "image_classification"
    auto_class = "AutoModelForImageClassification"
    architectures = ("ForImageClassification", "ForImageClassificationWithTeacher")
    main_input = "pixel_values"
    has_classes = True
    templates_name_classes = True
    required = ("image", "label")
    targets = "label"
    images = ("image",)
    files = ("preprocessor_config.json", "processor_config.json")

    def __init__(self, model: nn.Module, folder: Path, options: TaskOptions) -> None:
        super().__init__(model, folder, options)
        whole: Any = model.config
        config = getattr(whole, "vision_config", whole)  # where a model sees more than images
        self._mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
        self._length = _num_patches(config)
        self._dtype = next(model.parameters()).dtype
        self._size = height, width = _image_size(config)
        self._processor = self._note = None
        if has_any(folder, self.files):
            what = f"{folder}: the image processor"
            self._processor = read_with("AutoImageProcessor", folder, what)
        else:
            self._note = (
                f"{folder}: has no preprocessor_config.json; images are resized to {height} x "
                f"{width}, scaled to [0, 1] and normalised with mean 0.5 and deviation 0.5"
            )

    @property
    def notes(self) -> list[str]:
        return [] if self._note is None else [self._note]

    def encode(self, row: Mapping[str, Any], number: int) -> EncodedImage:
        source = image_source(value_of(row, "image"), None)
        check_image(source)
        label = self.labels.number(value_of(row, "label")) if self.options.need_targets else None
        return EncodedImage(number, self._length, source, label)

    def collate(self, examples: Sequence[EncodedImage]) -> Batch:
        images = []
        for example in examples:
            try:
                images.append(open_image(example.source, self._mode))
            except DataError as error:
                raise DataError(f"row {example.number + 1}: {error}") from error
        labels = [example.label for example in examples]
        return Batch(
            {"pixel_values": self._pixels(images).to(self._dtype)},
            [example.number for example in examples],
            None if None in labels else torch.tensor(labels),
        )

    def _pixels(self, images: Sequence[Any]) -> Tensor:  # (images, channels, height, width)
        if self._processor is not None:
            processed: Tensor = self._processor(images=images, return_tensors="pt")["pixel_values"]
            return processed
        height, width = self._size
        bilinear = import_optional("PIL.Image").Resampling.BILINEAR
        arrays = [np.asarray(image.resize((width, height), bilinear)) for image in images]
        pixels = torch.from_numpy(np.stack(arrays)).float() / 255  # (images, h, w) or with channels
        pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
        return (pixels - 0.5) / 0.5


def _image_size(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or _DEFAULT_SIZE
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _num_patches(config: Any) -> int:
    """Tokens of an image, in models that cut it into patches."""
    patch = getattr(config, "patch_size", None)
    height, width = _image_size(config)
    return (height // patch) * (width // patch) + 1 if isinstance(patch, int) and patch else 1
