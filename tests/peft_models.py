"""Tiny bases with PEFT adapters of random values, in folders; nothing is downloaded."""

import copy
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import bert_config, gpt2_config, llama_config, save, t5_config, vit_config
from torch import Tensor

MODELS = {
    "bert": (transformers.BertForSequenceClassification, bert_config(num_labels=3)),
    "gpt2": (transformers.GPT2LMHeadModel, gpt2_config()),
    "llama": (transformers.LlamaForCausalLM, llama_config()),
    "t5": (transformers.T5ForConditionalGeneration, t5_config()),
    "vit": (transformers.ViTForImageClassification, vit_config(num_labels=3)),
}


def make_base(architecture: str, folder: Path) -> Path:
    """Save a base with random values."""
    torch.manual_seed(0)
    make, config = MODELS[architecture]
    return save(make(copy.deepcopy(config)), folder)


def load(folder: Path) -> Any:
    """A full model of its own, of the class that its configuration names."""
    return copy.deepcopy(_read(folder))


@cache
def _read(folder: Path) -> Any:
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder).eval()


def adapt(base: Path | Any, config: Any, folder: Path, seed: int = 1) -> Path:
    """Save an adapter on a base, or on a model of one; all its values are moved at random."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        # That a layer is also saved whole, or lacks a bias, is what some tests are about.
        warnings.simplefilter("ignore")
        model = load(base) if isinstance(base, Path) else base
        adapted = get_peft_model(model, copy.deepcopy(config))  # which PEFT writes to
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        adapted.save_pretrained(folder)
    return folder


def put_on(base: Path | Any, adapter: Path) -> Any:
    """An adapter on its base, as PEFT loads it."""
    model = load(base) if isinstance(base, Path) else base
    return PeftModel.from_pretrained(model, adapter).eval()


def fold(base: Path | Any, adapter: Path) -> dict[str, Tensor]:
    """The state dict that PEFT makes of a base and an adapter, in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tied weights are the caller's concern
        state: dict[str, Tensor] = put_on(base, adapter).double().merge_and_unload().state_dict()
    return state


def logits(model: Any) -> Tensor:
    """What a model says, computed in float64: stored values are all that is rounded."""
    model = model.double().eval()
    inputs: dict[str, Tensor] = {
        "input_ids": torch.tensor([[2, 4, 5, 6, 9, 3], [2, 8, 7, 7, 4, 3]])
    }
    if model.config.model_type == "vit":
        generator = torch.Generator().manual_seed(0)
        inputs = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator).double()}
    if model.config.model_type == "t5":
        inputs["decoder_input_ids"] = torch.tensor([[0, 4, 5], [0, 6, 6]])
    with torch.no_grad():
        said: Tensor = model(**inputs).logits
    return said


def assert_same_function(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def tensors(adapter: Path) -> dict[str, Tensor]:
    return load_file(adapter / "adapter_model.safetensors")


def config_of(adapter: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    return content


def reconfigure(adapter: Path, **changes: Any) -> Path:
    """Change an adapter's configuration."""
    content = json.dumps(config_of(adapter) | changes)
    (adapter / "adapter_config.json").write_text(content)
    return adapter
