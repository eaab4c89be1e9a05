"""Sketches in eight bits: what rounding does to them, and files that hold them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sketched_models import RANK, collect, make_batches, make_model
from torch import Tensor

import matsmerge
from matsmerge.checkpoints.checkpoint import Buffer
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.checkpoints.safetensors_header import read_header
from matsmerge.statistics.coded_sketches import bytes_in_file, decode_sketches, encode_sketch

NAME = "main/inputs/first"


def make_sketch(row_sizes: Tensor, rank: int = 6) -> Tensor:
    """[B | diagonal] of a moment that is a little more than B Bᵀ."""
    torch.manual_seed(3)
    b = torch.randn(len(row_sizes), rank, dtype=torch.float64) * row_sizes[:, None]
    b *= torch.logspace(0, -2, rank, dtype=torch.float64)
    diagonal = b.square().sum(1, keepdim=True) + 0.1 * row_sizes[:, None] ** 2
    return torch.cat([b, diagonal], 1)


def decoded(arrays: dict[str, Tensor]) -> Tensor:
    return decode_sketches(InMemoryCheckpoint("file", arrays), {NAME: "sketch"})[NAME]


def test_each_number_is_off_by_half_a_step_at_most() -> None:
    kept = make_sketch(torch.rand(30, dtype=torch.float64))
    arrays = encode_sketch(NAME, kept)
    codes, scales, diagonal = arrays.values()
    assert codes.dtype == torch.int8
    assert codes.shape == (30, 6)
    assert bool((codes.abs().amax(0) == 127).all())  # all digits are used
    steps = scales.double() * diagonal.double().sqrt()[:, None]
    errors = (decoded(arrays).double() - kept).abs()
    assert bool((errors[:, :-1] <= 0.5001 * steps).all())
    torch.testing.assert_close(decoded(arrays)[:, -1], kept[:, -1].float(), rtol=0, atol=0)


def test_a_large_input_leaves_digits_to_others() -> None:
    sizes = torch.ones(40, dtype=torch.float64)
    sizes[7] = 1e4
    kept = make_sketch(sizes)
    b = kept[:, :-1] / sizes[:, None]  # as if all inputs were of one size
    found = decoded(encode_sketch(NAME, kept))[:, :-1].double() / sizes[:, None]
    correlations = b @ b.mT
    assert float((found @ found.mT - correlations).norm()) < 0.02 * float(correlations.norm())


def test_rows_and_columns_of_zeros() -> None:
    kept = make_sketch(torch.ones(20, dtype=torch.float64))
    kept[4] = 0
    kept[:, 2] = 0
    found = decoded(encode_sketch(NAME, kept))
    assert not bool(found[4].any())
    assert not bool(found[:, 2].any())
    assert float((found - kept).norm()) < 0.02 * float(kept.norm())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    for column in (1, -1):
        kept = make_sketch(torch.ones(10, dtype=torch.float64))
        kept[3, column] = bad
        assert not bool(decoded(encode_sketch(NAME, kept)).isfinite().all())


def test_reading_a_part() -> None:
    arrays = encode_sketch(NAME, make_sketch(torch.rand(12, dtype=torch.float64)))
    arrays["main/mean/first"] = torch.rand(11)
    stored = decode_sketches(InMemoryCheckpoint("file", arrays), {NAME: "sketch"})
    assert {*stored.specs} == {NAME, "main/mean/first"}
    torch.testing.assert_close(stored["main/mean/first"], arrays["main/mean/first"])
    whole = stored[NAME].view(-1)
    for start, stop in ((0, 1), (5, 20), (7, 14), (83, 84), (0, 84)):
        buffer = Buffer(stop - start, torch.float32)
        stored.read_into(buffer, NAME, start)
        torch.testing.assert_close(buffer.tensor, whole[start:stop], rtol=0, atol=0)


def test_files(tmp_path: Path) -> None:
    """Statistics of rank 12 have a byte for a number, and say that a newer version reads them."""
    model, batches = make_model(), make_batches()
    versions = {}
    for dtype in ("auto", "bfloat16"):
        out = tmp_path / f"{dtype}.safetensors"
        collect(model, batches, out=out, dtype=dtype)
        metadata = json.loads(read_header(out).metadata["matsmerge_statistics"])
        versions[dtype] = metadata["format_version"]
        assert matsmerge.open_statistics(out).arrays.specs[NAME].shape == (41, RANK + 1)
    assert versions == {"auto": 2, "bfloat16": 1}
    specs = read_header(tmp_path / "auto.safetensors").specs
    assert specs[NAME].num_bytes == 41 * RANK
    assert specs[f"{NAME}:scales"].shape == (RANK,)
    assert specs[f"{NAME}:diagonal"].shape == (41,)
    arrays = matsmerge.open_statistics(tmp_path / "auto.safetensors").arrays
    assert bytes_in_file(arrays, NAME) == 41 * RANK + 4 * RANK + 4 * 41
    total = sum(bytes_in_file(arrays, name) for name in arrays.specs)
    assert total == sum(spec.num_bytes for spec in specs.values())


def _drop_scales(arrays: dict[str, Tensor]) -> None:
    del arrays[f"{NAME}:scales"]


def _cut_diagonal(arrays: dict[str, Tensor]) -> None:
    arrays[f"{NAME}:diagonal"] = arrays[f"{NAME}:diagonal"][:-1].clone()


@pytest.mark.parametrize("damage", [_drop_scales, _cut_diagonal])
def test_damaged_files(tmp_path: Path, damage: Callable[[dict[str, Tensor]], None]) -> None:
    out = tmp_path / "s.safetensors"
    collect(make_model(), make_batches(), out=out)
    arrays = load_file(out)
    damage(arrays)
    save_file(arrays, out, dict(read_header(out).metadata))
    with pytest.raises(matsmerge.StatisticsError, match=f"'{NAME}'.* has not the form 'sketch'"):
        matsmerge.open_statistics(out)
