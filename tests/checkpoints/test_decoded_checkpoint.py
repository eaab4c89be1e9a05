"""Quantized checkpoints against a dense decoding of every element by itself."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import matsmerge
from matsmerge import CheckpointError
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.methods.site import BLOCK_ELEMENTS

FP8 = torch.float8_e4m3fn


def quantize(values: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A float8 matrix, and the scale of each of its blocks."""
    out, in_ = values.shape
    scales = torch.empty(math.ceil(out / rows), math.ceil(in_ / columns))
    quantized = torch.empty_like(values)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = values[block].abs().max() / 448
            quantized[block] = values[block] / scales[i, j]
    return quantized.to(FP8), scales


def dense(quantized: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """Element by element."""
    factors = scales.double().tolist()
    found = [
        [value * factors[i // rows][j // columns] for j, value in enumerate(row)]
        for i, row in enumerate(quantized.double().tolist())
    ]
    return torch.tensor(found, dtype=torch.float64)


def save(folder: Path, state: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llama", "quantization_config": quantization, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_blocks_that_do_not_divide_the_matrix(tmp_path: Path) -> None:
    quantized, scales = quantize(random(200, 300), 128, 128)
    state = {"w.weight": quantized, "w.weight_scale_inv": scales, "n.weight": torch.ones(3)}
    opened = open_checkpoint(save(tmp_path / "m", state, DEEPSEEK))
    assert set(opened.specs) == {"n.weight", "w.weight"}
    expected = dense(quantized, scales, 128, 128)
    assert opened.spec("w.weight").dtype == torch.bfloat16
    assert torch.equal(opened["w.weight"], expected.float().bfloat16())
    # Any stretch of it, too.
    for start, stop in ((0, 1), (299, 301), (12345, 40000), (59999, 60000)):
        part = opened.read("w.weight", start, stop)
        assert torch.equal(part, expected.flatten()[start:stop].float().bfloat16())
    assert "FP8" in str(opened.note)


@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [(32, 48, ()), (32, 48, (1,)), (1, 48, (32, 1)), (1, 48, (32,)), (1, 16, (32, 3))],
    ids=["tensor", "tensor-1", "channel", "channel-1", "group"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors(
    rows: int, columns: int, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    quantized, scales = quantize(random(32, 48), rows, columns)
    scales = scales.to(dtype)
    state = {
        "w.weight": quantized,
        "w.weight_scale": scales.reshape(shape).clone(),
        "w.input_scale": torch.ones(1),
        "self_attn.k_scale": torch.ones(1),
    }
    form = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    opened = open_checkpoint(save(tmp_path / "m", state, form))
    assert list(opened.specs) == ["w.weight"]
    expected = dense(quantized, scales, rows, columns).float().bfloat16()
    assert torch.equal(opened["w.weight"], expected)


def test_blocks_of_compressed_tensors_and_powers_of_two(tmp_path: Path) -> None:
    quantized, scales = quantize(random(100, 90), 64, 64)
    scales = torch.exp2(torch.log2(scales).round())
    weights = {"strategy": "block", "block_structure": [64, 64]}
    form = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }
    state = {"w.weight": quantized, "w.weight_scale": scales.to(torch.float8_e8m0fnu)}
    opened = open_checkpoint(save(tmp_path / "m", state, form))
    assert torch.equal(opened["w.weight"], dense(quantized, scales, 64, 64).float().bfloat16())


def test_fused_experts_with_block_scales(tmp_path: Path) -> None:
    parts = [quantize(random(150, 130, seed=i), 128, 128) for i in range(3)]
    state = {
        "m.experts.up_proj": torch.stack([q.view(torch.uint8) for q, _ in parts]).view(FP8),
        "m.experts.up_proj_scale_inv": torch.stack([s for _, s in parts]),
    }
    opened = open_checkpoint(save(tmp_path / "m", state, DEEPSEEK))
    expected = torch.stack([dense(q, s, 128, 128) for q, s in parts]).float().bfloat16()
    assert torch.equal(opened["m.experts.up_proj"], expected)
    assert torch.equal(
        opened.read("m.experts.up_proj", 19000, 40000), expected.flatten()[19000:40000]
    )


def test_plain_float8_stands_for_itself() -> None:
    values = random(5, 7).to(torch.float8_e5m2)
    opened = open_checkpoint({"w": values})
    assert torch.equal(opened["w"], values.bfloat16())


def test_scales_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    quantized, scales = quantize(random(200, 300), 128, 128)
    state = {"w.weight": quantized, "w.weight_scale_inv": scales, "v.weight": quantized.clone()}
    with pytest.raises(CheckpointError, match="'v.weight' is float8_e4m3fn .* has no scales"):
        open_checkpoint(save(tmp_path / "m", state, DEEPSEEK))
    del state["v.weight"]
    opened = open_checkpoint(save(tmp_path / "m", state, {"quant_method": "fp8"}))
    expected = dense(quantized, scales, 128, 128)  # what blocks are unless said otherwise
    assert torch.equal(opened["w.weight"], expected.float().bfloat16())
    state["w.weight_scale"] = state.pop("w.weight_scale_inv")
    with pytest.raises(CheckpointError, match=r"are \[2, 3\]: neither one, nor"):
        open_checkpoint(save(tmp_path / "m", state, {"quant_method": "compressed-tensors"}))


def packed_experts(seed: int) -> dict[str, Tensor]:
    """Two experts of gpt-oss: hidden size 64, inner size 32."""
    g = torch.Generator().manual_seed(seed)
    state = {}
    for name, num_out, num_in in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        shape = (2, num_out, num_in // 32)
        state[f"m.experts.{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), generator=g, dtype=torch.uint8
        )
        state[f"m.experts.{name}_scales"] = torch.randint(
            118, 126, shape, generator=g, dtype=torch.uint8
        )
        state[f"m.experts.{name}_bias"] = torch.randn(2, num_out, generator=g).bfloat16()
    return state


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Number by number: sign, two bits of exponent, one of mantissa."""
    experts, num_out, groups, _ = blocks.shape
    result = torch.zeros(experts, groups * 32, num_out, dtype=torch.float64)
    for e, o, g in (
        (e, o, g) for e in range(experts) for o in range(num_out) for g in range(groups)
    ):
        for b, byte in enumerate(blocks[e, o, g].tolist()):
            for half, bits in enumerate((byte & 15, byte >> 4)):
                exponent, mantissa = (bits >> 1) & 3, bits & 1
                size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
                number = (-1) ** (bits >> 3) * size * 2.0 ** (int(scales[e, o, g]) - 127)
                result[e, g * 32 + 2 * b + half, o] = number
    return result


def test_mxfp4(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    state = packed_experts(0)
    opened = open_checkpoint(save(tmp_path / "m", state, {"quant_method": "mxfp4"}))
    for name in ("m.experts.gate_up_proj", "m.experts.down_proj"):
        blocks, scales = state[f"{name}_blocks"], state[f"{name}_scales"]
        expected = unpack(blocks, scales).bfloat16()
        assert torch.equal(opened[name], expected)
        assert torch.equal(expected, convert_moe_packed_tensors(blocks, scales))
        stop = expected.numel() - 3
        assert torch.equal(opened.read(name, 1000, stop), expected.flatten()[1000:stop])
    assert {n.rpartition("_")[2] for n in opened.specs} == {"proj", "bias"}


@pytest.mark.filterwarnings("ignore:.*read as bfloat16:UserWarning")
@pytest.mark.parametrize("method", ["average", "della", "karcher"])
def test_a_merge_with_a_model_in_bfloat16(method: str, tmp_path: Path) -> None:
    """The same as of decoded models; more than one stretch, packed experts among it."""
    quantized, scales = quantize(random(512, 520), 128, 128)
    assert quantized.numel() > BLOCK_ELEMENTS
    fp8 = {"w.weight": quantized, "w.weight_scale_inv": scales, **packed_experts(1)}
    first = open_checkpoint(save(tmp_path / "fp8", fp8, DEEPSEEK))
    whole = {name: first[name] for name in first.specs}
    other = {n: (v + 0.1 * random(*v.shape, seed=5)).bfloat16() for n, v in whole.items()}
    base = {n: v.clone() for n, v in other.items()}
    options: dict[str, Any] = {"density": 0.5} if method == "della" else {}
    matsmerge.merge(
        {"a": str(tmp_path / "fp8"), "b": other}, base, method, out=tmp_path / "out", **options
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    exact = dense(quantized, scales, 128, 128).float()
    decoded = {**{n: v.float() for n, v in whole.items()}, "w.weight": exact}
    wide = {n: v.float() for n, v in other.items()}
    expected = matsmerge.merge(
        {"a": decoded, "b": wide}, {n: v.float() for n, v in base.items()}, method, **options
    )
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value, expected[name].bfloat16(), rtol=2**-7, atol=1e-6)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "llama", "torch_dtype": "bfloat16"}


def test_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for place in (file, tmp_path):
        with pytest.raises(CheckpointError, match="GGUF is a format to run models in"):
            open_checkpoint(place)
