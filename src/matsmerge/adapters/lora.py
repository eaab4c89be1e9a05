"""LoRA and DoRA: a change of low rank that is added to a module's weight.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; Liu et al., "DoRA:
Weight-Decomposed Low-Rank Adaptation", 2024.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from matsmerge.adapters.adapter import (
    CONFIG,
    PREFIX,
    Adapter,
    AdapterConfig,
    AdapterContent,
    AdapterKind,
    Change,
    LowRankChange,
    check_length,
    named_targets,
    regular_expressions,
)
from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec

DEFAULT_LORA_RANK = 8

# Initialisations after which the base is another model than the one that is stored.
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
# Options with which an adapter is not W + B A, or not of a module's weight.
_NOT_SUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "megatron_config",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
# What belongs to how an adapter was trained, and not to what it is.
_DEFAULTS: Mapping[str, Any] = {
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

LoraRank = Annotated[int, Field(ge=1, lt=2**31)]
ScaleFactor = Annotated[float, Field(gt=0, lt=1e9)]


class LoraContent(AdapterContent):
    """LoRA's own part of an adapter_config.json."""

    use_dora: bool | None = None
    use_rslora: bool | None = None
    bias: str | None = None
    r: LoraRank
    lora_alpha: ScaleFactor
    rank_pattern: Annotated[dict[str, LoraRank], AfterValidator(regular_expressions)] | None = None
    alpha_pattern: Annotated[dict[str, ScaleFactor], AfterValidator(regular_expressions)] | None = (
        None
    )


class Lora(AdapterKind):
    """W' = W + s B A, and for DoRA that times m / ||W + s B A||."""

    name = "lora"
    title = "LoRA"
    peft_type = "LORA"
    content = LoraContent
    tensors = re.compile(
        r"^(?P<module>.+)\.lora_(?P<part>((embedding_)?[AB]|magnitude_vector)(\.(?!weight$)\w+$)?)"
        r"(\.weight)?$"
    )
    has_rank = True
    options = ("rank", "alpha")

    def config_problems(self, content: Mapping[str, Any]) -> Iterator[str]:
        init = content.get("init_lora_weights")
        if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
            yield (
                f"init_lora_weights is '{init[:60]}', which changes the base; save it as a plain "
                "LoRA (peft: save_pretrained with path_initial_model_for_weight_conversion)"
            )
        for key in _NOT_SUPPORTED:
            if content.get(key):
                yield (
                    f"{key} is not supported; fold it into its base (peft: merge_and_unload) and "
                    "give the full model instead"
                )

    def tensor_problems(self, adapter: Adapter) -> Iterator[str]:
        specs, config = adapter.checkpoint.specs, adapter.config
        for module, parts in adapter.modules.items():
            pair = [p for p in (("A", "B"), ("embedding_A", "embedding_B")) if {*p} <= parts.keys()]
            known = {*(pair[0] if pair else ()), "magnitude_vector", "B.bias"}
            if len(pair) != 1 or parts.keys() - known:
                yield f"'{module}' has {', '.join(sorted(parts))}; expected lora_A and lora_B"
                continue
            a, b = (specs[parts[p]].shape for p in pair[0])
            rank = rank_of(config, module)
            if not a[:1] == b[1:2] == (rank,):
                yield f"'{module}' has factors {[*a]} and {[*b]}; {CONFIG} says rank {rank}"
            if config.uses_dora != ("magnitude_vector" in parts):
                has = "has a" if "magnitude_vector" in parts else "lacks the"
                yield f"'{module}' {has} magnitude vector, and use_dora is {config.uses_dora}"

    def changes(
        self, adapter: Adapter, module: str, weight: str, base: Checkpoint
    ) -> dict[str, Change]:
        parts, specs = adapter.modules[module], adapter.checkpoint.specs
        low_rank = low_rank_of(adapter, module)
        shape = base.specs[weight].shape
        change = specs[low_rank.b].shape[0], _matrix_shape(specs[low_rank.a].shape)[1]
        stored = _matrix_shape(shape)
        is_transposed = stored == change[::-1] and len(shape) == 2
        if stored == change and is_transposed:
            is_transposed = "embedding_A" in parts or adapter.config.has_transposed_weights
        elif stored != change and not is_transposed:
            raise ValueError(f"'{weight}' is {list(shape)}, its change is {list(change)}")
        found = {
            weight: Change(
                low_rank,
                factors=parts.get("magnitude_vector"),
                is_normalized="magnitude_vector" in parts,
                along=int(is_transposed),
                is_transposed=is_transposed,
            )
        }
        if "B.bias" in parts:
            bias = f"{weight.removesuffix('weight')}bias"
            found[bias] = Change(added=parts["B.bias"], added_scaling=low_rank.scaling)
            check_length(parts["B.bias"], bias, 0, adapter.checkpoint, base)
        return found

    def peft_settings(
        self,
        peft: Any,
        model: nn.Module,  # noqa: ARG002
        options: Mapping[str, Any],
        given: Mapping[str, Any],
    ) -> Any:
        rank = options["rank"] or DEFAULT_LORA_RANK
        return peft.LoraConfig(r=rank, lora_alpha=options["alpha"] or 2 * rank, **given)


def rank_of(config: AdapterConfig, module: str) -> int:
    """The rank that a configuration gives a module."""
    return int(_of_module(config, module, "rank_pattern", "r"))


def scaling_of(config: AdapterConfig, module: str) -> float:
    """The factor on B A: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
    alpha = float(_of_module(config, module, "alpha_pattern", "lora_alpha"))
    rank = rank_of(config, module)
    return alpha / (math.sqrt(rank) if config.content.get("use_rslora") else rank)


def _of_module(config: AdapterConfig, module: str, patterns: str, otherwise: str) -> Any:
    for pattern, value in (config.content.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):  # as PEFT matches them
            return value
    return config.content[otherwise]


def low_rank_of(adapter: Adapter, module: str) -> LowRankChange:
    """The change of a module's weight."""
    parts, config = adapter.modules[module], adapter.config
    a, b = parts.get("A") or parts["embedding_A"], parts.get("B") or parts["embedding_B"]
    return LowRankChange(a, b, rank_of(config, module), scaling_of(config, module))


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns: a convolution's filters as rows."""
    return shape[0], math.prod(shape[1:])


@dataclass(frozen=True)
class LoraLayer:
    """A module of a LoRA to be written, of scaling 1; `shape` is its weight's as it is stored."""

    module: str
    shape: tuple[int, ...]
    rank: int
    dtype: torch.dtype
    is_transposed: bool = False
    is_embedding: bool = False

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return _matrix_shape(self.shape)

    @property
    def names(self) -> tuple[str, str]:
        """Of A and B, as PEFT saves them."""
        before, after = ("lora_embedding_", "") if self.is_embedding else ("lora_", ".weight")
        stem = f"{PREFIX}{self.module}.{before}"
        return f"{stem}A{after}", f"{stem}B{after}"

    @property
    def specs(self) -> dict[str, TensorSpec]:
        rows, columns = self.matrix_shape
        inputs, outputs = (rows, columns) if self.is_transposed else (columns, rows)
        a: tuple[int, ...] = (self.rank, inputs)
        b: tuple[int, ...] = (outputs, self.rank)
        if len(self.shape) > 2:
            a, b = (self.rank, *self.shape[1:]), (outputs, self.rank, *(1 for _ in self.shape[2:]))
        return {name: TensorSpec(self.dtype, s) for name, s in zip(self.names, (a, b), strict=True)}

    def tensors(self, left: Tensor, right: Tensor) -> Mapping[str, Tensor]:
        """A and B for the change `left @ right` of the weight as it is stored."""
        a, b = (left.mT, right.mT) if self.is_transposed else (right, left)
        return {
            name: values.to(spec.dtype).reshape(spec.shape).contiguous()
            for (name, spec), values in zip(self.specs.items(), (a, b), strict=True)
        }


def lora_config(
    content: Mapping[str, Any],
    layers: Sequence[LoraLayer],
    biases: Sequence[str],
    kept: Iterable[str],
) -> dict[str, Any]:
    """The configuration of a LoRA with these layers and a scaling of 1, from another one's.

    Of a configuration of another kind, what all kinds have is taken over. `biases` are parameters
    it brings, `kept` the modules it brings whole.
    """
    if content.get("peft_type", Lora.peft_type) != Lora.peft_type:
        content = {key: content[key] for key in AdapterContent.model_fields if key in content}
    ranks = {layer.module: layer.rank for layer in layers}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {module: r for module, r in ranks.items() if r != rank}
    modules = {bias.removesuffix(".bias") for bias in biases}
    of_biases = "lora_only" if modules <= ranks.keys() else "all"
    return {
        **content,
        **{key: value for key, value in _DEFAULTS.items() if key in content},
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": dict(others),
        "bias": of_biases if biases else "none",
        "modules_to_save": sorted(set(kept)) or None,
        **named_targets(content, ranks),
    }
