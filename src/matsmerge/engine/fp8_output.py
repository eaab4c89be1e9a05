"""Writing a merged model in FP8, in the form in which an input is stored."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from matsmerge.checkpoints.alignment import AlignedModel, Alignment
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.decoded_checkpoint import quantization_config
from matsmerge.checkpoints.fused_experts import SeparatedExperts
from matsmerge.checkpoints.scaled_floats import Scaled
from matsmerge.engine.adapter_output import AdapterOutput
from matsmerge.errors import RecipeError
from matsmerge.recipes.recipe import FP8, Recipe

_NUMBERED = re.compile(r"\.\d+(\.|$)")
# Names of modules in a quantization_config that are not quantized.
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore")


@dataclass(frozen=True)
class Fp8Output:
    """What is written in FP8, and what config.json says of it."""

    scaled: Mapping[str, Scaled] = field(default_factory=dict)  # by parameter
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def plan_fp8(
    recipe: Recipe, alignment: Alignment, output: AdapterOutput, files: Checkpoint | None
) -> Fp8Output:
    """The form of the base, or else of the first model that is in FP8; `files` go with the result.

    What that one stores otherwise keeps the dtype it is merged in.
    """
    if recipe.dtype != FP8:
        return Fp8Output()
    base = [alignment.base] if alignment.base else []
    like = next((model for model in (*base, *alignment.models) if _scaled(model)), None)
    if like is None:
        raise RecipeError(
            "dtype: fp8 writes what the base or a model has in FP8, and none is stored so; write "
            "bfloat16, and quantize the result (llm-compressor, transformers' FineGrainedFP8Config)"
        )
    config = quantization_config(like.checkpoint.folder)
    config = config or quantization_config(files.folder if files else None)
    RecipeError.raise_all(_refusals(recipe, output, like, config))
    changed = _for_weights(config)
    scaled = _scaled(like)
    notes = [f"{len(scaled)} tensors are written in FP8, as {like.checkpoint.label} stores them"]
    if changed != config:
        notes.append("config.json says that scales of activations are dynamic: old ones do not fit")
    return Fp8Output(scaled, {"quantization_config": changed} if changed else {}, tuple(notes))


def _scaled(model: AlignedModel) -> dict[str, Scaled]:
    found = {name: model.checkpoint.scaled_as(own) for name, own in model.names.items()}
    return {name: how for name, how in found.items() if how is not None}


def _refusals(
    recipe: Recipe, output: AdapterOutput, like: AlignedModel, config: Mapping[str, Any]
) -> Iterator[str]:
    if output.config is not None or output.finish is not None:
        yield "dtype: fp8 is for full models; choose another one, or output: dense, for adapters"
    methods = [spec.at_depth(0) for _, spec in recipe.method_specs()]
    if recipe.matches_heads or any(method.uses_merged_inputs for method in methods):
        yield "dtype: fp8 cannot be run while it is merged; leave out inputs: merged, match_heads"
    experts = like.checkpoint
    if isinstance(experts, SeparatedExperts):
        fused = [n for n in _scaled(like) if like.names[n] in experts.pieces]
        if fused:
            yield (
                f"dtype: fp8: {experts.label} stores experts fused, such as "
                f"'{experts.pieces[like.names[fused[0]]].tensor}', which is not written in FP8; "
                "choose bfloat16"
            )
    left_out = [str(name) for key in _LEFT_OUT for name in config.get(key) or ()]
    if recipe.stack and any(map(_NUMBERED.search, left_out)):
        yield (
            f"dtype: fp8: the quantization_config of {like.checkpoint.label} names modules of "
            "single layers, which have other numbers in a stack; choose bfloat16"
        )


def _for_weights(config: Mapping[str, Any]) -> dict[str, Any]:
    """A quantization_config whose scales of activations are found while the model runs."""
    changed = dict(config)
    if "activation_scheme" in config:
        changed["activation_scheme"] = "dynamic"
    if config.get("kv_cache_scheme") is not None:
        changed["kv_cache_scheme"] = None
    groups = config.get("config_groups")
    if isinstance(groups, dict):
        changed["config_groups"] = {name: _for_weights_of(g) for name, g in groups.items()}
    return changed


def _for_weights_of(group: Any) -> Any:
    inputs = group.get("input_activations") if isinstance(group, dict) else None
    if not isinstance(inputs, dict) or inputs.get("dynamic"):
        return group
    dynamic = {"dynamic": True, "strategy": "token", "observer": None}
    return {**group, "input_activations": {**inputs, **dynamic}}
