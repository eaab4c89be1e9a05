"""Reading an adapter from the folder that PEFT saved, and fitting it to its base.

`ADAPTER_KINDS` is the table of all kinds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from matsmerge.adapters.adapter import CONFIG, PREFIX, Adapter, AdapterConfig, AdapterKind, Change
from matsmerge.adapters.ia3 import IA3
from matsmerge.adapters.lora import Lora
from matsmerge.checkpoints.alignment import match_prefix
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.companions import read_object
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.errors import CheckpointError
from matsmerge.files.guarded_files import parse_as
from matsmerge.problems import noted, reworded, shortened

ADAPTER_KINDS: dict[str, AdapterKind] = {kind.name: kind for kind in (Lora(), IA3())}


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
    content = read_object(path)
    found = str(content.get("peft_type"))
    kind = next((kind for kind in ADAPTER_KINDS.values() if kind.peft_type == found), None)
    if kind is None:
        raise CheckpointError(
            f"{path}: is an adapter of type {found[:60]}; expected "
            f"{' or '.join(kind.peft_type for kind in ADAPTER_KINDS.values())}. For others, fold "
            "it into its base (peft: merge_and_unload) and give the full model instead"
        )
    problems = [f"{path}: {problem}" for problem in kind.config_problems(content)]
    with noted(problems, CheckpointError):
        parse_as(content, kind.content, str(path), CheckpointError)
    CheckpointError.raise_all(problems)
    return AdapterConfig(path, kind, content)


def read_adapter(checkpoint: Checkpoint) -> Adapter | None:
    """The adapter in a checkpoint's folder, or None for a full model."""
    if not is_adapter(checkpoint.folder):
        patterns = [kind.tensors for kind in ADAPTER_KINDS.values()]
        if any(pattern.match(name) for name in checkpoint.specs for pattern in patterns):
            raise CheckpointError(
                f"{checkpoint.label}: holds an adapter's tensors and no {CONFIG}, which says how "
                "to use them; give the folder that PEFT saved"
            )
        return None
    assert checkpoint.folder is not None
    return make_adapter(checkpoint, read_adapter_config(checkpoint.folder))


def make_adapter(checkpoint: Checkpoint, config: AdapterConfig) -> Adapter:
    """Sort an adapter's tensors, and check them against each other."""
    modules: dict[str, dict[str, str]] = {}
    values: dict[str, str] = {}
    problems = []
    for tensor in checkpoint.specs:
        name = tensor.removeprefix(PREFIX)
        if name == tensor:
            problems.append(f"'{tensor}' does not begin with '{PREFIX}', as PEFT saves it")
        elif found := config.kind.tensors.match(name):
            modules.setdefault(_plain(found["module"]), {})[found["part"]] = tensor
        elif ".original_module." not in name and ".modules_to_save." not in name:
            values[_plain(name)] = tensor
    adapter = Adapter(checkpoint, config, modules, values)
    problems += config.kind.tensor_problems(adapter)
    if not modules and not problems:
        problems.append(f"holds no tensors of the type {config.kind.peft_type}")
    CheckpointError.raise_all(shortened([f"{checkpoint.label}: {p}" for p in problems]))
    return adapter


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".").removesuffix(".base_layer")


def open_base(adapter: Adapter) -> Checkpoint:
    """Open the base that an adapter's configuration names."""
    path, name = adapter.config.path, adapter.config.base
    if name is None:
        raise CheckpointError(
            f"{path}: does not name its base in 'base_model_name_or_path'; give it with --base"
        )
    with reworded(before=f"{path}: its base: "):
        base = open_checkpoint(name)
    if base.folder is None:
        raise CheckpointError(f"{path}: its base '{name}' is not a model's folder")
    return base


@dataclass(frozen=True)
class Fitted:
    """An adapter on its base: what becomes of which of the base's tensors."""

    changes: Mapping[str, Change]  # tensor of the base -> what becomes of it
    values: Mapping[str, str]  # tensor of the base, or new -> tensor of the adapter
    modules: Mapping[str, str]  # weight in the base -> module, as the adapter names it
    parameters: Mapping[str, str]  # value in the base -> parameter, as the adapter names it


def names_in(adapter: Adapter, base: Checkpoint) -> dict[str, str]:
    """The adapter's parameters in the base's file, which may differ by a leading module."""
    own = [*adapter.weights, *adapter.values]
    rename, _ = match_prefix(base, {name: name for name in own})
    return {name: base.aliases.get(rename(name), rename(name)) for name in own}


def fit(adapter: Adapter, base: Checkpoint, names: Mapping[str, str] | None = None) -> Fitted:
    """Find what an adapter changes in a base, by name and shape; every misfit at once.

    `names` are tensors of the base by the adapter's parameters, where they are known better.
    """
    names = names_in(adapter, base) | dict(names or {})
    changes: dict[str, Change] = {}
    problems: list[str] = []
    modules: dict[str, str] = {}
    parameters = {names[name]: name for name in adapter.values}
    if len(parameters) < len(adapter.values):
        problems.append(f"brings values for two weights that {base.label} has as one")
    for weight, module in adapter.weights.items():
        name = names[weight]
        if name not in base.specs:
            problems.append(f"changes '{weight}', which {base.label} does not have")
            continue
        try:
            changes |= adapter.kind.changes(adapter, module, name, base)
            modules[name] = module
        except ValueError as error:
            problems.append(f"does not fit {base.label}: {error}")
    CheckpointError.raise_all(
        shortened([f"{adapter.label}: {p}; was it made for another base?" for p in problems])
    )
    values = {name: adapter.values[own] for name, own in parameters.items()}
    return Fitted(changes, values, modules, parameters)
