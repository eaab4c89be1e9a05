"""Merged models in FP8: what is written is the merge, encoded as the inputs are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.quantizers.auto import AutoQuantizationConfig

import matsmerge
from matsmerge import MatsError, Merged
from matsmerge.checkpoints.scaled_floats import Scaled, encode_fp8
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.engine.prepared_merge import prepare_merge
from matsmerge.recipes.recipe import make_recipe

E4M3 = torch.float8_e4m3fn
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BLOCKS = Scaled(E4M3, "_scale_inv", 128, 128)
PER_TENSOR = Scaled(E4M3, "_scale", single=(1,))
PER_ROW = Scaled(E4M3, "_scale", 1, 301, scale_dtype=torch.bfloat16)
STATIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
            "input_activations": {"num_bits": 8, "dynamic": False, "strategy": "tensor"},
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"num_bits": 8},
}
NAME = "model.layers.0.w.weight"


def make_model(
    folder: Path, scaled: Scaled, config: dict[str, Any], seed: int, num_layers: int = 1
) -> Path:
    """Layers in FP8, larger than a block of ours, beside a head in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {
        "lm_head.weight": torch.randn(7, 5, generator=generator).bfloat16(),
        "model.layers.0.k_scale": torch.ones(1),
    }
    for i in range(num_layers):
        name = f"model.layers.{i}.w.weight"
        encoded, scales = encode_fp8(torch.randn(300, 301, generator=generator).bfloat16(), scaled)
        state |= {
            name: encoded,
            f"{name}{scaled.ending}": scales.reshape(scaled.scales_of((300, 301)).shape),
            f"model.layers.{i}.w.input_scale": torch.ones(1),
        }
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    whole = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "torch_dtype": "bfloat16",
        "quantization_config": config,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def written(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def merge(models: Any, base: Any, method: str, out: Path | None = None, **options: Any) -> Merged:
    """A merge whose notes are no warnings."""
    return matsmerge.plan(models, base, method, **options).merge(out)


def read_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("scaled", "config"),
    [(BLOCKS, DEEPSEEK), (PER_TENSOR, STATIC), (PER_ROW, STATIC)],
    ids=["blocks", "tensor", "row"],
)
@pytest.mark.parametrize("method", ["average", "ties", "tsv_m"])
def test_the_merge_is_encoded_as_the_inputs_are(
    scaled: Scaled, config: dict[str, Any], method: str, tmp_path: Path
) -> None:
    base, *models = (make_model(tmp_path / f"m{i}", scaled, config, i) for i in range(3))
    out = tmp_path / "out"
    merge(list(map(str, models)), str(base), method, dtype="fp8", out=out)
    # The same merge in float32, of the numbers that the inputs stand for.
    plain = merge(list(map(str, models)), str(base), method, dtype="float32")
    found = written(out)
    assert set(found) == {"lm_head.weight", NAME, f"{NAME}{scaled.ending}"}
    assert torch.equal(found["lm_head.weight"], plain["lm_head.weight"].bfloat16())
    encoded, scales = encode_fp8(plain[NAME], scaled)
    assert torch.equal(found[NAME].view(torch.uint8), encoded.view(torch.uint8))
    stored = found[f"{NAME}{scaled.ending}"]
    assert stored.dtype == scaled.scale_dtype
    assert stored.shape == written(base)[f"{NAME}{scaled.ending}"].shape
    assert torch.equal(stored.flatten(), scales.flatten())
    assert open_checkpoint(out).scaled_as(NAME) == open_checkpoint(base).scaled_as(NAME)


@pytest.mark.parametrize("scaled", [BLOCKS, PER_TENSOR])
def test_one_model_in_is_the_same_out(scaled: Scaled, tmp_path: Path) -> None:
    config = DEEPSEEK if scaled is BLOCKS else STATIC
    model = make_model(tmp_path / "m", scaled, config, 1)
    merge([str(model)], None, "average", dtype="fp8", out=tmp_path / "out")
    found, given = written(tmp_path / "out"), written(model)
    for name, value in found.items():
        assert value.dtype == given[name].dtype
        assert torch.equal(value.view(torch.uint8), given[name].view(torch.uint8))


def test_the_configuration_is_right(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", BLOCKS, DEEPSEEK, 1)
    merge([str(model)], None, "average", dtype="fp8", out=tmp_path / "out")
    assert read_config(tmp_path / "out") == read_config(model)
    config = read_config(tmp_path / "out")["quantization_config"]
    parsed = AutoQuantizationConfig.from_dict(config)
    assert (parsed.quant_method, parsed.weight_block_size) == ("fp8", [128, 128])

    static = make_model(tmp_path / "static", PER_TENSOR, STATIC, 1)
    merged = merge([str(static)], None, "average", dtype="fp8", out=tmp_path / "dynamic")
    config = read_config(tmp_path / "dynamic")["quantization_config"]
    inputs = config["config_groups"]["group_0"]["input_activations"]
    assert inputs["dynamic"] is True
    assert inputs["strategy"] == "token"
    assert config["kv_cache_scheme"] is None
    assert config["ignore"] == STATIC["ignore"]
    assert any("activations" in note for note in merged.notes)
    assert merged.parameters[NAME]["dtype"] == "float8_e4m3fn"


def test_the_form_is_that_of_a_model_where_the_base_has_none(tmp_path: Path) -> None:
    models = [make_model(tmp_path / f"m{i}", BLOCKS, DEEPSEEK, i) for i in range(2)]
    merge([str(models[0])], None, "average", out=tmp_path / "base")
    assert "quantization_config" not in read_config(tmp_path / "base")
    base = str(tmp_path / "base")
    out = tmp_path / "out"
    merge(list(map(str, models)), base, "task_arithmetic", dtype="fp8", out=out)
    assert read_config(out)["quantization_config"] == DEEPSEEK
    assert written(out)[NAME].dtype == E4M3


def test_layers_of_a_stack_are_in_fp8(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", BLOCKS, DEEPSEEK, 1, num_layers=3)
    recipe = {
        "models": [{"model": str(model), "name": "m"}],
        "method": "passthrough",
        "stack": [{"m": [0, 2]}, {"m": [1, 3]}],
        "dtype": "fp8",
    }
    matsmerge.plan(make_recipe(recipe)).merge(tmp_path / "out")
    found, given = written(tmp_path / "out"), written(model)
    for i, source in enumerate((0, 1, 1, 2)):
        for end in ("", "_scale_inv"):
            value = found[f"model.layers.{i}.w.weight{end}"]
            expected = given[f"model.layers.{source}.w.weight{end}"]
            assert torch.equal(value.view(torch.uint8), expected.view(torch.uint8))

    listing = {**DEEPSEEK, "modules_to_not_convert": ["model.layers.1.gate", "lm_head"]}
    numbered = make_model(tmp_path / "numbered", BLOCKS, listing, 1, num_layers=3)
    recipe["models"] = [{"model": str(numbered), "name": "m"}]
    with pytest.raises(MatsError, match="names modules of single layers"):
        matsmerge.plan(make_recipe(recipe)).merge(tmp_path / "other")


def test_documents_may_use_results_in_fp8(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", BLOCKS, DEEPSEEK, 1)
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"name: first\nmodels: [{model}]\nmethod: average\ndtype: fp8\n---\n"
        "models: [first]\nmethod: average\ndtype: fp8\n"
    )
    matsmerge.plan(file).merge(tmp_path / "out")
    found, given = written(tmp_path / "out"), written(model)
    assert torch.equal(found[NAME].view(torch.uint8), given[NAME].view(torch.uint8))


def test_float8_without_scales_is_rounded_to_it() -> None:
    models = [{"w.weight": torch.tensor([1.0, v]).to(E4M3)} for v in (3.0, 3.25)]
    found = merge(models, None, "average", dtype="fp8")
    assert found["w.weight"].dtype == E4M3
    assert found["w.weight"].tolist() == [1.0, 3.0]  # of 3.125, halfway, the even one


def test_what_cannot_be_written_is_said_before(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "m", BLOCKS, DEEPSEEK, 1))
    plain = {"w.weight": torch.ones(3, 3)}
    with pytest.raises(MatsError, match="none is stored so"):
        merge([plain], None, "average", dtype="fp8")
    with pytest.raises(MatsError, match="for full models"):
        merge([model], None, "average", dtype="fp8", output="adapter")
    experts = {
        "m.experts.up_proj": torch.ones(2, 128, 128).to(E4M3),
        "m.experts.up_proj_scale_inv": torch.ones(2, 1, 1),
        "m.experts.down_proj": torch.ones(2, 128, 128).to(E4M3),
        "m.experts.down_proj_scale_inv": torch.ones(2, 1, 1),
    }
    with pytest.raises(MatsError, match=r"experts fused, such as 'm.experts.up_proj'"):
        merge([experts], None, "average", dtype="fp8")


def test_memory_is_planned(tmp_path: Path) -> None:
    def peak(scaled: Scaled, config: dict[str, Any], dtype: str) -> int:
        folder = tmp_path / f"{scaled.ending}{dtype}"
        model = str(make_model(folder, scaled, config, 1))
        recipe = make_recipe({"models": [model], "method": "average", "dtype": dtype})
        return prepare_merge(recipe).plan.peak_bytes(1)

    plain = peak(BLOCKS, DEEPSEEK, "bfloat16")
    assert peak(BLOCKS, DEEPSEEK, "fp8") - plain == 3 * 4 * 128 * 301
    assert peak(PER_TENSOR, STATIC, "fp8") - plain == 3 * 4 * 300 * 301
