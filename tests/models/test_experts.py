"""Fused experts run one by one: the same outputs, the same memory, and names in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SIZES, gpt_oss_config, mixtral_config
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from matsmerge.checkpoints.fused_experts import separate_experts
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.models.experts import ExpertsApart, find_fused, parameter_shapes
from matsmerge.models.parameter_names import match_names, unmatched_names

OF_FOUR = {"vocab_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, Any] = {
    "mixtral": mixtral_config,
    "gpt-oss": gpt_oss_config,
    "olmoe": lambda: OlmoeConfig(**SIZES, **OF_FOUR),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES,
        **OF_FOUR,
        num_key_value_heads=2,
        moe_intermediate_size=16,
    ),
    "granite-moe": lambda: GraniteMoeConfig(
        **SIZES, vocab_size=24, num_local_experts=4, num_experts_per_tok=2
    ),
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_apart_they_do_the_same_on_the_same_memory(name: str) -> None:
    model = make(name)
    tokens = torch.randint(0, 24, (3, 7))
    fused = dict(model.named_parameters())
    with torch.no_grad():
        expected = model(tokens).logits
        with ExpertsApart(model).installed():
            found = model(tokens).logits
            apart = dict(model.named_parameters())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert {n: tuple(p.shape) for n, p in apart.items()} == parameter_shapes(model)
    experts = {n: p for n, p in fused.items() if p.ndim == 3}
    assert len(experts) == 4
    for number in range(4):
        part = apart[f"{next(iter(find_fused(model)))[0]}.{number}.down_proj.weight"]
        whole = next(p for n, p in experts.items() if n.endswith("down_proj"))
        assert part.data_ptr() == whole[number].data_ptr()
        assert torch.equal(part, whole[number])
    assert dict(model.named_parameters()).keys() == fused.keys()


def test_experts_that_do_something_else_stay_as_they_are() -> None:
    model = make("mixtral")
    experts = model.model.layers[0].mlp.experts

    class Scaled(type(experts)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Any:
            return 2 * super().forward(*args)

    experts.__class__ = Scaled
    with ExpertsApart(model).installed():
        assert model.model.layers[0].mlp.experts is experts
        assert model.model.layers[1].mlp.experts is not experts


def test_experts_that_take_no_gradients_stay_as_they_are() -> None:
    model = make("mixtral").requires_grad_(False)
    experts = model.model.layers[0].mlp.experts
    with ExpertsApart(model).installed():
        assert model.model.layers[0].mlp.experts is experts


@pytest.mark.parametrize("is_original", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_part_is_found_in_its_checkpoint(name: str, is_original: bool, tmp_path: Path) -> None:
    """Saved as the hub has them, and as transformers has them in memory."""
    model = make(name)
    model.save_pretrained(tmp_path, save_original_format=is_original)
    raw = open_checkpoint(tmp_path)
    checkpoint = separate_experts(raw)
    names = match_names(model, raw)
    assert unmatched_names(model, names) == []
    with ExpertsApart(model).installed():
        for parameter, values in model.named_parameters():
            assert torch.equal(checkpoint[names[parameter]], values), parameter
    used = set(names.values())
    assert used == {*checkpoint.specs} - ({"lm_head.weight"} - used)


def test_a_prefix_that_differs(tmp_path: Path) -> None:
    """A checkpoint of the bare decoder, read for the one with a head."""
    model = make("qwen3-moe")
    model.model.save_pretrained(tmp_path)
    names = match_names(model, open_checkpoint(tmp_path))
    part = "layers.1.mlp.experts.3.up_proj.weight"
    assert names[f"model.{part}"] == part
    assert unmatched_names(model, names) == ["lm_head.weight"]
