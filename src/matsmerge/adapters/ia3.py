"""(IA)^3: a vector that scales what a module puts out, or in a feed-forward what it takes in.

Liu et al., "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context
Learning", 2022.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator
from torch import nn

from matsmerge.adapters.adapter import (
    Adapter,
    AdapterConfig,
    AdapterContent,
    AdapterKind,
    Change,
    Modules,
    check_length,
    named_targets,
    regular_expressions,
)
from matsmerge.checkpoints.checkpoint import Checkpoint


class IA3Content(AdapterContent):
    """(IA)^3's own part of an adapter_config.json."""

    feedforward_modules: Annotated[Modules, AfterValidator(regular_expressions)] | None = None


class IA3(AdapterKind):
    """W' = W * v."""

    name = "ia3"
    title = "(IA)^3"
    peft_type = "IA3"
    content = IA3Content
    tensors = re.compile(r"^(?P<module>.+)\.(?P<part>ia3_l)$")
    is_folded = False
    options = ("feedforward_modules",)
    learning_rate = 5e-3

    def changes(
        self, adapter: Adapter, module: str, weight: str, base: Checkpoint
    ) -> dict[str, Change]:
        vector = adapter.modules[module]["ia3_l"]
        shape, stored = adapter.checkpoint.specs[vector].shape, base.specs[weight].shape
        # A linear layer's vector shows in its shape what it scales; a convolution's does not.
        is_linear = len(shape) == 2 and shape != (1, 1)
        of_inputs = shape[0] == 1 if is_linear else scales_inputs(adapter.config, module)
        num = adapter.checkpoint.specs[vector].num_elements
        along = int(of_inputs)
        if len(stored) == 2:
            fits = [stored[along] == num, stored[1 - along] == num]
            if adapter.config.has_transposed_weights if all(fits) else fits[1]:
                along = 1 - along
        check_length(vector, weight, along, adapter.checkpoint, base)
        changes = {weight: Change(factors=vector, along=along)}
        bias = f"{weight.removesuffix('weight')}bias"
        if not of_inputs and bias in base.specs:
            changes[bias] = Change(factors=vector)
        return changes

    def peft_settings(
        self, peft: Any, model: nn.Module, options: Mapping[str, Any], given: Mapping[str, Any]
    ) -> Any:
        targets, feedforward = given["target_modules"], options["feedforward_modules"]
        if targets is not None and feedforward is None:
            # Those that PEFT takes for the second map of a feed-forward in this architecture.
            config: Any = model.config
            known = peft.utils.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING
            feedforward = [t for t in targets if t in known.get(config.model_type, ())]
        return peft.IA3Config(feedforward_modules=feedforward, **given)


def scales_inputs(config: AdapterConfig, module: str) -> bool:
    """Does the vector scale the module's inputs rather than its outputs?"""
    targets = config.content.get("feedforward_modules") or []
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module.endswith(target) for target in targets)  # as PEFT has it


def ia3_config(adapters: Sequence[Adapter], kept: Iterable[str]) -> dict[str, Any]:
    """The configuration of an (IA)^3 adapter with all modules of several; `kept` are whole."""
    content = adapters[0].config.content
    changed = {"modules_to_save": sorted(set(kept)) or None, "inference_mode": True}
    modules = {module for adapter in adapters for module in adapter.modules}
    if all(set(adapter.modules) == modules for adapter in adapters):
        return {**content, **changed}
    feedforward = {m for a in adapters for m in a.modules if scales_inputs(a.config, m)}
    named = named_targets(content, modules)
    return {**content, **changed, **named, "feedforward_modules": sorted(feedforward)}
