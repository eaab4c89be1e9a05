"""What an adapter is, and what each kind of adapters says of itself.

Everything an adapter can do to a weight is one of

    W' = W + s B A                         LoRA
    W' = (W + s B A) * m / ||W + s B A||   DoRA; m and the norms belong to outputs
    W' = W * v                             (IA)^3; v belongs to outputs, or inputs if feedforward
    W' = V                                 values it brings whole: biases, `modules_to_save`

and what there is to do is known from headers and the configuration.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.files.guarded_files import Content

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # what PEFT puts in front of the names of the model's own

_HEADS = ("classifier", "score", "qa_outputs", "classification_head")

Modules = list[str] | str  # names, or a regular expression
V = TypeVar("V", list[str] | str, dict[str, Any])


def regular_expressions(value: V) -> V:
    """Refuse a regular expression, or keys that should be such, that is none."""
    if isinstance(value, list):  # of names
        return value
    for pattern in [value] if isinstance(value, str) else value:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"'{pattern}' is not a regular expression ({error})") from error
    return value


@dataclass(frozen=True)
class LowRankChange:
    """Tensors with a weight's change B A, and the factor on it."""

    a: str
    b: str
    rank: int
    scaling: float


@dataclass(frozen=True)
class Change:
    """What becomes of one parameter, as it is stored; names are those of the adapter's tensors."""

    low_rank: LowRankChange | None = None
    added: str | None = None  # a vector to add, `scaling` times
    added_scaling: float = 1.0
    factors: str | None = None  # (IA)^3's vector, or DoRA's magnitudes
    is_normalized: bool = False  # DoRA
    along: int = 0  # the dimension that the factors belong to; 0 is that of rows
    is_transposed: bool = False  # stored as (in, out)


class AdapterContent(Content):
    """The parts of an adapter_config.json that are used of every kind, with their types."""

    peft_type: str
    base_model_name_or_path: str | None = None
    revision: str | None = None
    task_type: str | None = None
    auto_mapping: dict[str, str | None] | None = None
    modules_to_save: list[str] | None = None
    target_modules: Modules | None = None
    exclude_modules: Modules | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: Modules | None = None
    fan_in_fan_out: bool | None = None


class AdapterKind(ABC):
    """One kind of adapters: its configuration, its tensors, what they do, how one is trained."""

    name: ClassVar[str]  # in our options and manifests
    title: ClassVar[str]  # in messages
    peft_type: ClassVar[str]  # in adapter_config.json
    content: ClassVar[type[AdapterContent]] = AdapterContent
    # The names of its tensors, without PEFT's prefix: `module`, and `part` of several.
    tensors: ClassVar[re.Pattern[str]]
    # Merged and measured as the full weights it makes of its base, or as its own tensors.
    is_folded: ClassVar[bool] = True
    has_rank: ClassVar[bool] = False  # merged adapters may have another rank, or be aligned
    options: ClassVar[tuple[str, ...]] = ()  # of `TrainingOptions`, those it alone has
    learning_rate: ClassVar[float] = 1e-4

    def config_problems(self, content: Mapping[str, Any]) -> Iterator[str]:  # noqa: ARG002
        """What a configuration asks for that cannot be done; types are not checked yet."""
        yield from ()

    def tensor_problems(self, adapter: "Adapter") -> Iterator[str]:  # noqa: ARG002
        """What is wrong with an adapter's tensors, among themselves."""
        yield from ()

    @abstractmethod
    def changes(
        self, adapter: "Adapter", module: str, weight: str, base: Checkpoint
    ) -> dict[str, Change]:
        """What becomes of a module's parameters in the base; a ValueError says what is unfit."""

    def factors(
        self, adapter: Checkpoint, change: LowRankChange, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """B, scaled, and A as matrices, whose product is added to a weight (out, in)."""
        b = adapter[change.b].to(dtype).flatten(1) * change.scaling
        return b, adapter[change.a].to(dtype).flatten(1)

    @abstractmethod
    def peft_settings(
        self, peft: Any, model: nn.Module, options: Mapping[str, Any], given: Mapping[str, Any]
    ) -> Any:
        """PEFT's configuration of a new one: `given` and what training's options say."""


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter's configuration says; `content` is all of it."""

    path: Path
    kind: AdapterKind
    content: Mapping[str, Any]

    @property
    def base(self) -> str | None:
        """The name or path of the model it was made for, with `@revision` on the hub."""
        name, revision = self.content.get("base_model_name_or_path"), self.content.get("revision")
        if not name:
            return None
        return f"{name}@{revision}" if revision and not Path(name).exists() else str(name)

    @property
    def task_type(self) -> str | None:
        return self.content.get("task_type")

    @property
    def has_transposed_weights(self) -> bool:
        """Does it say that weights are (in, out)? Needed for square ones only."""
        return bool(self.content.get("fan_in_fan_out"))

    @property
    def uses_dora(self) -> bool:
        return bool(self.content.get("use_dora"))


@dataclass(frozen=True)
class Adapter:
    """An adapter's tensors by what they do, under names of the model it was made for."""

    checkpoint: Checkpoint
    config: AdapterConfig
    modules: Mapping[str, Mapping[str, str]]  # module -> part ("A", "B", "ia3_l", ...) -> tensor
    values: Mapping[str, str]  # parameter -> tensor with its values

    @property
    def label(self) -> str:
        return self.checkpoint.label

    @property
    def kind(self) -> AdapterKind:
        return self.config.kind

    @property
    def heads(self) -> list[str]:
        """Parameters it brings whole that belong to its task alone."""
        modules = {name.rpartition(".")[0] for name in self.values if name.endswith(".weight")}
        return [n for n in self.values if is_head(n) and n.rpartition(".")[0] in modules]

    @property
    def own_values(self) -> dict[str, str]:
        """The values it brings, without those of weights it changes, which are the base's."""
        return {n: tensor for n, tensor in self.values.items() if n not in self.weights}

    @cached_property
    def weights(self) -> dict[str, str]:
        """The weight of every module it changes."""
        return {f"{module}.weight": module for module in self.modules}


def is_head(parameter: str) -> bool:
    """Does a parameter's name say that it is of a task's head?"""
    return any(part in _HEADS for part in parameter.split("."))


def check_length(
    tensor: str, parameter: str, along: int, adapter: Checkpoint, base: Checkpoint
) -> None:
    """Raise a ValueError unless a vector has an element for each row (or column) of a parameter."""
    spec = base.specs.get(parameter)
    num = adapter.specs[tensor].num_elements
    if spec is None or spec.shape[along] != num:
        found = "missing" if spec is None else f"{list(spec.shape)}"
        raise ValueError(f"'{parameter}' is {found}, '{tensor}' has {num} elements")


def named_targets(content: Mapping[str, Any], modules: Any) -> dict[str, Any]:
    """Options that say which modules are adapted: each by its whole name."""
    names = ("exclude_modules", "layers_to_transform", "layers_pattern")
    return {"target_modules": sorted(modules), **{n: None for n in names if n in content}}
