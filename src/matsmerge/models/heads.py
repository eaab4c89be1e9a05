"""Heads of tasks that are stored apart from the encoder they belong on, or made of words."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from matsmerge.adapters.adapter import PREFIX
from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec, dtype_name
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.data.row_problems import refuse
from matsmerge.data.template import Template
from matsmerge.errors import DataError
from matsmerge.models.pretrained import architecture_of, load_pretrained, read_with, skeleton
from matsmerge.optional_import import import_optional

_LABEL = "label"  # what prompts call the name of a class


class HeadOutput(NamedTuple):
    """What a model returns, as those of transformers do."""

    logits: Tensor  # (examples, classes)


class LogitScale(nn.Module):
    """exp(s) x, a module of its own so that it can be looked at alone."""

    def __init__(self, logit_scale: Tensor) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(logit_scale)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.logit_scale.exp()


class EncoderWithHead(nn.Module):
    """An encoder and a linear head on its pooled output, for encoders that have no such class.

    logits = W h + b                          on the pooled hidden state h
    logits = exp(s) W e / |e| + b             on a projected embedding e (zero-shot heads)
    """

    base_model_prefix = "encoder"

    def __init__(
        self, encoder: nn.Module, head: nn.Linear, logit_scale: Tensor | None, *, projected: bool
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.scale = None if logit_scale is None else LogitScale(logit_scale)
        self.projected = projected
        self.config: Any = encoder.config

    def forward(self, **inputs: Any) -> HeadOutput:
        output = self.encoder(**inputs)
        features = output.image_embeds if self.projected else output.pooler_output.flatten(1)
        features = features.to(self.head.weight.device)  # an encoder may be spread over several
        if self.projected:
            features = normalize(features, dim=-1)
            if self.scale is not None:
                features = self.scale(features)
        return HeadOutput(self.head(features))


def is_plain_head(head: Checkpoint) -> bool:
    """Is the file just a linear layer: `weight`, and maybe `bias`?"""
    return "weight" in head.specs and set(head.specs) <= {"weight", "bias"}


def load_encoder_with_head(
    checkpoint: Checkpoint, head: Checkpoint, config: Any, dtype: torch.dtype, device_map: Any
) -> tuple[EncoderWithHead, list[str]]:
    """An encoder with a plain linear head; where it goes follows from its size."""
    shape = head.specs["weight"].shape
    if len(shape) != 2:
        raise DataError(f"{head.label}: expected 'weight' (classes, size), found {list(shape)}")
    num_classes, size = shape
    if "bias" in head.specs and head.specs["bias"].shape != (num_classes,):
        raise DataError(
            f"{head.label}: 'bias' is {list(head.specs['bias'].shape)}, expected [{num_classes}] "
            "as 'weight' has rows"
        )
    encoder_class, config, projected = _encoder_class(checkpoint, head, config, size)
    config.num_labels = num_classes
    encoder, notes = load_pretrained(
        encoder_class, checkpoint, config, dtype, device_map, partly_used=True
    )
    linear = nn.Linear(size, num_classes, bias="bias" in head.specs, dtype=dtype)
    notes += put_head(linear, head, {name: name for name in head.specs})
    scale = None
    if projected and "logit_scale" in checkpoint.specs:
        scale = checkpoint["logit_scale"].to(dtype)
    return EncoderWithHead(encoder, linear, scale, projected=projected), notes


def _encoder_class(
    checkpoint: Checkpoint, head: Checkpoint, config: Any, size: int
) -> tuple[Any, Any, bool]:
    """The class of the encoder, its configuration, and whether the head is on its projection."""
    transformers = import_optional("transformers")
    name = architecture_of(config)
    vision = copy.deepcopy(getattr(config, "vision_config", config))
    if vision is not config and hasattr(config, "projection_dim"):
        vision.projection_dim = config.projection_dim  # what a saved tower has of its own is stale
    stem = name.removesuffix("WithProjection").removesuffix("Model").removesuffix("Vision")
    with_projection = getattr(transformers, f"{stem}VisionModelWithProjection", None)
    has_projection = with_projection is not None and "visual_projection.weight" in checkpoint.specs
    if has_projection and size == vision.projection_dim:
        return with_projection, vision, True
    hidden_size = _hidden_size(vision)
    if size != hidden_size:
        also = f" or {vision.projection_dim}, of its projection" if has_projection else ""
        raise DataError(
            f"{head.label}: 'weight' is {list(head.specs['weight'].shape)}, expected a second size "
            f"of {hidden_size}, that of {checkpoint.label}'s hidden states{also}"
        )
    tower = getattr(transformers, f"{stem}VisionModel", None)
    if tower is None:
        tower = getattr(transformers, name, None) or transformers.AutoModel
    return tower, vision, False


def _hidden_size(config: Any) -> int:
    sizes = getattr(config, "hidden_sizes", None)
    return int(sizes[-1] if sizes else config.hidden_size)


def head_parameters(model: nn.Module, head: Checkpoint) -> dict[str, str]:
    """Which of a model's parameters the tensors of a head file are (parameter -> tensor)."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    prefix = getattr(model, "base_model_prefix", "")
    names: dict[str, str] = {}
    problems = []
    for stored, spec in head.specs.items():
        plain = stored.removeprefix(PREFIX)
        name = next((n for n in (plain, f"{prefix}.{plain}") if n in shapes), None)
        if name is None:
            problems.append(f"{head.label}: '{stored}' is no parameter of {type(model).__name__}")
        elif spec.shape != shapes[name]:
            problems.append(
                f"{head.label}: '{stored}' is {list(spec.shape)}, {type(model).__name__} expects "
                f"{list(shapes[name])}"
            )
        else:
            names[name] = stored
    refuse(problems)
    return names


def put_head(model: nn.Module, head: Checkpoint, names: Mapping[str, str]) -> list[str]:
    """Give parameters the values of a head's tensors (parameter -> tensor); notes on rounding."""
    with torch.no_grad():
        for name, stored in names.items():
            model.get_parameter(name).copy_(head[stored])
    for name, stored in names.items():
        spec, dtype = head.specs[stored], model.get_parameter(name).dtype
        if torch.promote_types(spec.dtype, dtype) != dtype:
            found = dtype_name(dtype)
            return [f"{head.label}: '{stored}' is {spec}, rounded to the model's {found}"]
    return []


def class_dimensions(auto_class: Any, config: Any) -> dict[str, int]:
    """The parameters of a model that grow with its classes, and the dimension that does."""
    two, three = (
        {name: tuple(p.shape) for name, p in skeleton(auto_class, config, n).named_parameters()}
        for n in (2, 3)
    )
    return {
        name: next(i for i in range(len(shape)) if shape[i] != three[name][i])
        for name, shape in two.items()
        if shape != three[name]
    }


def num_classes_of_head(auto_class: Any, config: Any, head: Mapping[str, TensorSpec]) -> int | None:
    """How many classes a head with these tensors has."""
    for name, dimension in class_dimensions(auto_class, config).items():
        if name in head and dimension < len(head[name].shape):
            return head[name].shape[dimension]
    return None


def make_text_head(
    checkpoint: Checkpoint,
    config: Any,
    labels: Sequence[str] | None,
    prompts: Sequence[str],
    dtype: torch.dtype,
) -> Checkpoint:
    """A plain head for the image encoder of a model with two towers, from its text encoder.

        w_c = mean over prompts t of  e(t with the name of c) / |e|, of length one

    as CLIP classifies without training (Radford et al., 2021): the row of a class is the direction
    of what the model says of its name.
    """
    label = checkpoint.label
    transformers = import_optional("transformers")
    model_class = getattr(transformers, architecture_of(config), None)
    if not hasattr(config, "text_config") or not hasattr(model_class, "get_text_features"):
        raise DataError(
            f"{label}: has no text encoder beside its image encoder, from which a template could "
            "make a head; leave out the template, or give the head with --head FILE / head:"
        )
    if not labels:
        raise DataError(f"{label}: a head made from a template needs the classes' names in labels:")
    templates = [Template(prompt) for prompt in prompts]
    refuse(p for t in templates for p in t.problems("a class", [_LABEL]))
    model, _ = load_pretrained(model_class, checkpoint, config, dtype, None)
    tokenizer = read_with("AutoTokenizer", Path(str(checkpoint.folder)), f"{label}: its tokenizer")
    model.eval()
    rows = [
        _direction(model, tokenizer, [t.fill({_LABEL: name}) for t in templates]) for name in labels
    ]
    return InMemoryCheckpoint("the head made of its labels", {"weight": torch.stack(rows)})


def _direction(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        found = model.get_text_features(**inputs)
    # Newer versions of transformers return an object.
    embeddings = found if isinstance(found, Tensor) else found.pooler_output
    return normalize(normalize(embeddings, dim=-1).mean(0), dim=-1)
