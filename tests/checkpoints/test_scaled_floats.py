"""FP8 with scales against an encoding of every block by itself."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from matsmerge.checkpoints.checkpoint import TensorSpec
from matsmerge.checkpoints.scaled_floats import Scaled, ScaledWriter, encode_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = Scaled(E4M3, "_scale_inv", 128, 128)
FORMS = {
    "blocks": BLOCKS,
    "tensor": Scaled(E4M3, "_scale", single=(1,)),
    "rows": Scaled(E4M3, "_scale", 1, 300),
    "groups": Scaled(E4M3, "_scale", 1, 60),
    "wide range": Scaled(E5M2, "_scale", 128, 128),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread_out(scales: Tensor, scaled: Scaled, shape: tuple[int, int]) -> Tensor:
    """The scale of every number."""
    if scaled.single is not None:
        return scales.float().expand(shape)
    rows = torch.arange(shape[0]) // scaled.rows
    return scales.float()[rows][:, torch.arange(shape[1]) // scaled.columns]


def half_units(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between the neighbours of a number in a dtype."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.double())[1] - 1
    lowest = math.frexp(info.smallest_normal)[1] - 1
    return torch.exp2(exponent.clamp(min=lowest).double()) * info.eps / 2


@pytest.mark.parametrize("form", FORMS)
def test_scales_and_distance(form: str) -> None:
    scaled, values = FORMS[form], random(200, 300)
    encoded, scales = encode_fp8(values, scaled)
    assert encoded.dtype == scaled.dtype
    assert TensorSpec(scales.dtype, tuple(scales.shape)).num_elements == (
        scaled.scales_of((200, 300)).num_elements
    )
    wide = spread_out(scales, scaled, (200, 300))
    for scale in wide.unique():
        largest = values[wide == scale].abs().max()
        assert scale == largest / torch.finfo(scaled.dtype).max
    # Rounding to nearest, but for what dividing in float32 may shift.
    quotients = values.double() / wide.double()
    distance = (encoded.double() - quotients).abs()
    assert (distance <= half_units(quotients, scaled.dtype) * (1 + 2**-18)).all()


def test_ties_go_to_even_numbers() -> None:
    values = torch.tensor([[448.0, 17.0, 19.0, 21.0, -17.0]])  # between 16, 18, 20 and 22
    encoded, scales = encode_fp8(values, Scaled(E4M3, "_scale", single=()))
    assert scales.item() == 1
    assert encoded.tolist() == [[448.0, 16.0, 20.0, 20.0, -16.0]]


@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_encoding_again_changes_no_bit(seed: int, dtype: torch.dtype) -> None:
    size = 10.0 ** (seed % 9 - 4)
    values = (random(130, 140, seed=seed) * size).to(dtype)
    encoded, scales = encode_fp8(values, BLOCKS)
    decoded = encoded.float() * spread_out(scales, BLOCKS, (130, 140))
    again, same = encode_fp8(decoded, BLOCKS)
    assert torch.equal(same, scales)
    assert torch.equal(again.view(torch.uint8), encoded.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_powers_of_two_are_the_next_ones(dtype: torch.dtype) -> None:
    scaled = Scaled(E4M3, "_scale_inv", 1, 4, scale_dtype=dtype, has_powers=True)
    values = torch.tensor([[448.0, 1, 1, 1], [449.0, 1, 1, 1], [3.0, 1, 1, 1]])
    encoded, scales = encode_fp8(values, scaled)
    assert scales.float().flatten().tolist() == [1.0, 2.0, 2.0**-7]
    assert encoded.float().isfinite().all()


def test_rounded_scales_overflow_nothing_and_zeros_stay() -> None:
    scaled = Scaled(E4M3, "_scale", 1, 50, scale_dtype=torch.bfloat16)
    values = random(500, 50)
    values[7] = 0
    encoded, scales = encode_fp8(values, scaled)
    assert scales.dtype == torch.bfloat16
    assert encoded.float().isfinite().all()
    assert (encoded[7].float() == 0).all()
    assert scales[7].item() == 1
    quotients = values.double() / scales.double()
    distance = (encoded.double() - quotients).abs()
    assert (distance <= half_units(quotients, E4M3) * (1 + 2**-18)).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", [1, 7, 4096, 10**6])
def test_pieces_of_any_size_are_written_the_same(form: str, step: int) -> None:
    scaled, values = FORMS[form], random(3, 40, 300)
    if scaled.single is None and step == 1:
        values = values[:1]  # one by one takes long
    shape = tuple(values.shape)
    spec = scaled.scales_of(shape)
    written = {"w": torch.zeros(shape, dtype=scaled.dtype).flatten()}
    written[f"w{scaled.ending}"] = torch.zeros(spec.shape).flatten()

    def write(name: str, start: int, part: Tensor) -> None:
        written[name][start : start + len(part)] = part

    writer = ScaledWriter(scaled, "w", shape, write)
    flat = values.flatten()
    for start in range(0, len(flat), step):
        writer.take(start, flat[start : start + step])
    if scaled.single is not None:
        encoded, scales = encode_fp8(values.view(-1, 300), scaled)
    else:
        parts = [encode_fp8(matrix, scaled) for matrix in values]
        encoded = torch.stack([e.view(torch.uint8) for e, _ in parts]).view(scaled.dtype)
        scales = torch.stack([s for _, s in parts])
    assert torch.equal(written["w"].view(torch.uint8), encoded.flatten().view(torch.uint8))
    assert torch.equal(written[f"w{scaled.ending}"], scales.flatten())
