"""Adapter configurations as PEFT saves them, against what PEFT makes of them."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
from damaged_files import mutated_texts, refused
from peft import IA3Config, LoraConfig, get_peft_model
from peft.tuners.ia3 import IA3Layer
from peft.tuners.lora import LoraLayer
from torch import nn

from matsmerge.adapters.adapter_folder import is_adapter, read_adapter_config
from matsmerge.adapters.ia3 import scales_inputs
from matsmerge.adapters.lora import rank_of, scaling_of
from matsmerge.errors import CheckpointError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)


class Network(nn.Module):
    """Modules whose names end alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.down = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Block() for _ in range(12)])


def save_adapter(config: Any, folder: Path) -> nn.Module:
    """Save an adapter on a network; returns the network with it."""
    adapted = get_peft_model(Network(), copy.deepcopy(config))
    adapted.save_pretrained(folder)
    network = adapted.base_model.model
    assert isinstance(network, Network)
    return network


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.parametrize(
    "options",
    [
        {"r": 2, "lora_alpha": 7},
        {"r": 3, "lora_alpha": 7, "use_rslora": True},
        {"r": 2, "rank_pattern": {"layers.1.up": 4}, "alpha_pattern": {"down": 3}},
        {"r": 2, "use_rslora": True, "rank_pattern": {r"layers\.\d\.up": 5, "up": 3}},
        {"r": 2, "alpha_pattern": {"^down": 3, r".*\.1[01]\.(up|down)": 0.5}},
        {"r": 2, "rank_pattern": {"own": 3}},  # the end of a name, but not of a part of it
    ],
)
def test_scalings_are_those_of_peft(options: dict[str, Any], tmp_path: Path) -> None:
    network = save_adapter(LoraConfig(target_modules=["up", "down", "embed"], **options), tmp_path)
    config = read_adapter_config(tmp_path)
    assert config.kind.name == "lora"
    layers = {name: m for name, m in network.named_modules() if isinstance(m, LoraLayer)}
    assert len(layers) == 26
    for name, layer in layers.items():
        assert rank_of(config, name) == layer.r["default"], name
        assert scaling_of(config, name) == pytest.approx(layer.scaling["default"], rel=1e-12), name


@pytest.mark.parametrize(
    ("targets", "feedforward"),
    [
        (["up", "down"], ["down"]),
        (["up", "down"], []),
        (r"(.*\.)?(up|down)", r"layers\.1\d?\.down"),
        # PEFT takes these for ends of names, be they those of a part or not.
        (r"(.*\.)?(up|down)", ["wn"]),
        (r"(.*\.)?(up|down)", ["layers.1.up", "1.down"]),
    ],
)
def test_feedforward_modules_are_those_of_peft(
    targets: list[str] | str, feedforward: list[str] | str, tmp_path: Path
) -> None:
    settings = IA3Config(target_modules=targets, feedforward_modules=feedforward)
    network = save_adapter(settings, tmp_path)
    config = read_adapter_config(tmp_path)
    assert config.kind.name == "ia3"
    layers = {name: m for name, m in network.named_modules() if isinstance(m, IA3Layer)}
    assert len(layers) == 25
    found = {name for name in layers if scales_inputs(config, name)}
    assert found == {name for name, layer in layers.items() if layer.is_feedforward}


def test_what_else_it_says(tmp_path: Path) -> None:
    save_adapter(LoraConfig(target_modules=["up"], use_dora=True), tmp_path)
    config = read_adapter_config(tmp_path)
    assert config.uses_dora
    assert not config.has_transposed_weights
    assert config.task_type is None
    assert config.base is None


def test_names_of_bases(tmp_path: Path) -> None:
    """A revision belongs to a name on the hub, and not to a folder."""
    save_adapter(LoraConfig(target_modules=["up"]), tmp_path)
    path = tmp_path / "adapter_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"base_model_name_or_path": "owner/name"}))
    assert read_adapter_config(tmp_path).base == "owner/name"
    path.write_text(
        json.dumps(content | {"base_model_name_or_path": "owner/name", "revision": "v2"})
    )
    assert read_adapter_config(tmp_path).base == "owner/name@v2"
    path.write_text(
        json.dumps(content | {"base_model_name_or_path": str(tmp_path), "revision": "main"})
    )
    assert read_adapter_config(tmp_path).base == str(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.LoHaConfig(target_modules=["up"]), "adapter of type LOHA; expected LORA or IA3"),
        (
            LoraConfig(target_modules=["up"], r=2, init_lora_weights="pissa_niter_4"),
            "init_lora_weights is 'pissa_niter_4', which changes the base",
        ),
        (
            LoraConfig(target_modules=["up"], r=2, init_lora_weights="olora"),
            "init_lora_weights is 'olora', which changes the base",
        ),
        (
            LoraConfig(target_modules=["up"], trainable_token_indices={"embed": [1, 2]}),
            "trainable_token_indices is not supported; fold it into its base",
        ),
        (
            LoraConfig(target_modules=[], target_parameters=["layers.0.up.weight"]),
            "target_parameters is not supported; fold it into its base",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(config: Any, message: str, tmp_path: Path) -> None:
    save_adapter(config, tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_adapter_config(tmp_path)
    assert all(str(tmp_path / "adapter_config.json") in p for p in caught.value.problems)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": None}, "of type None"),
        ({"r": None}, "r: input should be a valid integer, found None"),
        ({"r": 0}, "r: input should be greater than or equal to 1, found 0"),
        ({"r": 2.5}, "r: input should be a valid integer, found 2.5"),
        ({"r": True}, "r: input should be a valid integer, found True"),
        ({"lora_alpha": "8"}, "lora_alpha: input should be a valid number, found '8'"),
        ({"lora_alpha": math.inf}, "lora_alpha: input should be .*, found inf"),
        ({"lora_alpha": 10**400}, "lora_alpha: input should be "),
        ({"rank_pattern": {"up": -1}}, "rank_pattern.up: input should be greater than .* found -1"),
        ({"alpha_pattern": ["up"]}, "alpha_pattern: input should be .*, found a list"),
        ({"modules_to_save": 1}, "modules_to_save: input should be a valid list, found 1"),
        ({"modules_to_save": [1]}, "modules_to_save.0: input should be a valid string, found 1"),
        ({"auto_mapping": 1}, "auto_mapping: input should be a valid dictionary, found 1"),
        ({"use_rslora": "yes"}, "use_rslora: input should be a valid boolean, found 'yes'"),
        ({"rank_pattern": {"(up": 2}}, "rank_pattern: '\\(up' is not a regular expression"),
        (
            {"base_model_name_or_path": 5},
            "base_model_name_or_path: input should be a valid string, found 5",
        ),
    ],
)
def test_damaged_settings_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_adapter(LoraConfig(target_modules=["up"]), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_adapter_config(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_damaged_files_are_refused(kind: str, tmp_path: Path) -> None:
    lora = LoraConfig(target_modules=["up"], rank_pattern={"up": 4}, alpha_pattern={"up": 2})
    ia3 = IA3Config(target_modules=["up"], feedforward_modules=["up"])
    save_adapter(lora if kind == "lora" else ia3, tmp_path)
    path = tmp_path / "adapter_config.json"

    def use() -> None:
        config = read_adapter_config(tmp_path)
        json.dumps([config.base, config.task_type, config.uses_dora, config.has_transposed_weights])
        for module in ("layers.0.up", "down"):
            if config.kind.name == "lora":
                assert 0 < rank_of(config, module) < 2**31
                assert 0 < scaling_of(config, module) < math.inf
            else:
                scales_inputs(config, module)

    assert len(refused(path, mutated_texts(json.loads(path.read_text())), use)) > 100


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    save_adapter(LoraConfig(target_modules=["up"]), tmp_path)
    path = tmp_path / "adapter_config.json"
    changes = {"r": 0, "use_qalora": True, "layer_replication": [[0, 2]]}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError) as caught:
        read_adapter_config(tmp_path)
    assert len(caught.value.problems) == 3


def test_which_folders_are_adapters(tmp_path: Path) -> None:
    assert not is_adapter(None)
    assert not is_adapter(tmp_path)
    save_adapter(LoraConfig(target_modules=["up"]), tmp_path)
    assert is_adapter(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(CheckpointError, match="holds both a model and an adapter"):
        is_adapter(tmp_path)
