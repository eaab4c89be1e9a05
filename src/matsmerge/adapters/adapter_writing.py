"""`adapter_config.json` of a merged adapter."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matsmerge.adapters.adapter import Adapter
from matsmerge.adapters.lora_layer import LoraLayer

# What belongs to how an adapter was trained, and not to what it is.
_LORA_DEFAULTS: Mapping[str, Any] = {
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "init_lora_weights": True,
    "inference_mode": True,
    "loftq_config": {},
    "eva_config": None,
    "corda_config": None,
    "lora_ga_config": None,
}


def lora_config(
    content: Mapping[str, Any],
    layers: Sequence[LoraLayer],
    biases: Sequence[str],
    kept: Iterable[str],
) -> dict[str, Any]:
    """The configuration of a LoRA with these layers and a scaling of 1, from another one's.

    `biases` are parameters it brings, `kept` the modules it brings whole.
    """
    ranks = {layer.module: layer.rank for layer in layers}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {module: r for module, r in ranks.items() if r != rank}
    modules = {bias.removesuffix(".bias") for bias in biases}
    if not biases:
        bias = "none"
    else:
        bias = "lora_only" if modules <= ranks.keys() else "all"
    return {
        **content,
        **{key: value for key, value in _LORA_DEFAULTS.items() if key in content},
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": dict(others),
        "bias": bias,
        "modules_to_save": sorted(set(kept)) or None,
        **named_targets(content, ranks),
    }


def ia3_config(adapters: Sequence[Adapter], kept: Iterable[str]) -> dict[str, Any]:
    """The configuration of an (IA)^3 adapter with all modules of several."""
    content = adapters[0].config.content
    changed = {"modules_to_save": sorted(set(kept)) or None, "inference_mode": True}
    modules = {module for adapter in adapters for module in adapter.modules}
    if all(set(adapter.modules) == modules for adapter in adapters):
        return {**content, **changed}
    feedforward = {
        module
        for adapter in adapters
        for module in adapter.modules
        if adapter.config.is_feedforward(module)
    }
    return {
        **content,
        **changed,
        **named_targets(content, modules),
        "feedforward_modules": sorted(feedforward),
    }


def named_targets(content: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Any]:
    """Options that say which modules are adapted: each by its whole name."""
    names = ("exclude_modules", "layers_to_transform", "layers_pattern")
    return {"target_modules": sorted(modules), **{n: None for n in names if n in content}}
