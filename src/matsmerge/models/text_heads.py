"""Heads made of words: a class is the direction of what a model says of its name.

    w_c = mean over prompts t of  e(t with the name of c) / |e|, of length one

as CLIP classifies without training (Radford et al., 2021).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.data.row_problems import refuse
from matsmerge.data.template import Template
from matsmerge.errors import DataError
from matsmerge.models.pretrained import architecture_of, load_pretrained, read_with
from matsmerge.optional_import import import_optional

COLUMN = "label"  # what prompts call the name of a class


def make_text_head(
    checkpoint: Checkpoint,
    config: Any,
    labels: Sequence[str] | None,
    prompts: Sequence[str],
    dtype: torch.dtype,
) -> Checkpoint:
    """A plain head for the image encoder of a model with two towers, from its text encoder."""
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
    refuse(p for t in templates for p in t.problems("a class", [COLUMN]))
    model, _ = load_pretrained(model_class, checkpoint, config, dtype, None)
    tokenizer = read_with("AutoTokenizer", Path(str(checkpoint.folder)), f"{label}: its tokenizer")
    model.eval()
    rows = [
        _direction(model, tokenizer, [t.fill({COLUMN: name}) for t in templates]) for name in labels
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
