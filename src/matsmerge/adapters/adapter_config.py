"""`adapter_config.json`: what kind of adapter a folder holds, and its scalings."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from matsmerge.checkpoints.companions import read_json
from matsmerge.errors import CheckpointError
from matsmerge.guarded_files import Content, parse_as

CONFIG = "adapter_config.json"

Kind = Literal["lora", "ia3"]
_KINDS: Mapping[str, Kind] = {"LORA": "lora", "IA3": "ia3"}
_ADVICE = "fold it into its base (peft: merge_and_unload) and give the full model instead"

# LoRA: initialisations after which the base is another model than the one that is stored.
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
# LoRA: options with which an adapter is not W + B A, or not of a module's weight.
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


Modules = list[str] | str  # names, or a regular expression
Rank = Annotated[int, Field(ge=1, lt=2**31)]
Factor = Annotated[float, Field(gt=0, lt=1e9)]


class _Content(Content):
    """The parts of an adapter_config.json that are used, with their types."""

    peft_type: str
    base_model_name_or_path: str | None = None
    revision: str | None = None
    task_type: str | None = None
    auto_mapping: dict[str, str | None] | None = None
    modules_to_save: list[str] | None = None
    target_modules: Modules | None = None
    exclude_modules: Modules | None = None
    feedforward_modules: Modules | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: Modules | None = None
    fan_in_fan_out: bool | None = None
    use_dora: bool | None = None
    use_rslora: bool | None = None
    bias: str | None = None
    r: Rank | None = None
    lora_alpha: Factor | None = None
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Factor] | None = None


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter's configuration says; `content` is all of it."""

    path: Path
    kind: Kind
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

    def rank(self, module: str) -> int:
        return int(self._of(module, "rank_pattern", "r"))

    def scaling(self, module: str) -> float:
        """The factor on B A: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
        alpha, rank = float(self._of(module, "alpha_pattern", "lora_alpha")), self.rank(module)
        return alpha / (math.sqrt(rank) if self.content.get("use_rslora") else rank)

    def _of(self, module: str, patterns: str, otherwise: str) -> Any:
        for pattern, value in (self.content.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):  # as PEFT matches them
                return value
        return self.content[otherwise]

    def is_feedforward(self, module: str) -> bool:
        """(IA)^3: does the vector scale the module's inputs rather than its outputs?"""
        targets = self.content.get("feedforward_modules") or []
        if isinstance(targets, str):
            return re.fullmatch(targets, module) is not None
        return any(module.endswith(target) for target in targets)  # as PEFT has it


def is_adapter(folder: Path | None) -> bool:
    """Is the folder one that PEFT saved?"""
    if folder is None or not (folder / CONFIG).is_file():
        return False
    if any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder}: holds both a model and an adapter ({CONFIG}); "
            "move one of them to a folder of its own"
        )
    return True


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The configuration in an adapter's folder; all that cannot be done with it is said."""
    path = folder / CONFIG
    content = read_json(path)
    found = str(content.get("peft_type"))
    if found not in _KINDS:
        raise CheckpointError(
            f"{path}: is an adapter of type {found[:60]}; expected LORA or IA3. For others, "
            f"{_ADVICE}"
        )
    config = AdapterConfig(path, _KINDS[found], content)
    problems = [f"{path}: {problem}" for problem in _not_supported(config)]
    try:
        typed = parse_as(content, _Content, str(path), CheckpointError)
        problems += [f"{path}: {problem}" for problem in _problems(config.kind, typed)]
    except CheckpointError as error:
        problems = error.problems + problems
    if problems:
        raise CheckpointError(problems)
    return config


def _problems(kind: Kind, content: _Content) -> Iterator[str]:
    if kind == "ia3":
        if isinstance(content.feedforward_modules, str):
            yield from _bad_regexes("feedforward_modules", [content.feedforward_modules])
        return
    for key in ("r", "lora_alpha"):
        if getattr(content, key) is None:
            yield f"{key} is missing, expected a positive number"
    for key in ("rank_pattern", "alpha_pattern"):
        yield from _bad_regexes(key, getattr(content, key) or {})


def _not_supported(config: AdapterConfig) -> Iterator[str]:
    if config.kind == "ia3":
        return
    init = config.content.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        yield (
            f"init_lora_weights is '{init[:60]}', which changes the base; save it as a plain LoRA "
            "(peft: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for key in _NOT_SUPPORTED:
        if config.content.get(key):
            yield f"{key} is not supported; {_ADVICE}"


def _bad_regexes(key: str, patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            yield f"{key}: '{pattern}' is not a regular expression ({error})"
