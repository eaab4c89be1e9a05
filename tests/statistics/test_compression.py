"""Compressed statistics are what collecting at that rank gives."""

from pathlib import Path

import pytest
import torch
from sketched_models import RANK, Batch, collect, make_batches, make_model
from torch import nn

import matsmerge
from matsmerge.statistics.compression import compress_statistics
from matsmerge.statistics.statistics import HELD_OUT, MAIN, Statistics
from matsmerge.statistics.statistics_file import save_statistics
from matsmerge.statistics.statistics_sum import combine_statistics


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture
def batches() -> list[Batch]:
    return make_batches()


def _are_the_same(ours: Statistics, expected: Statistics, atol: float = 1e-9) -> None:
    assert ours.header.forms == expected.header.forms
    assert ours.header.sketching == expected.header.sketching
    assert ours.header.options == expected.header.options
    assert ours.header.sets == expected.header.sets
    for name in expected.header.forms:
        of, _, key = name.partition("/")
        found, wanted = ours.array(key, of), expected.array(key, of)
        torch.testing.assert_close(found, wanted, rtol=0, atol=atol * float(wanted.norm()))


@pytest.mark.parametrize("rank", [RANK, 4])  # whole moments are summed up, or sketches
def test_whole_moments(model: nn.Module, batches: list[Batch], rank: int) -> None:
    full = collect(model, batches, "full", held_out=0.3)
    expected = collect(model, batches, rank, held_out=0.3)
    ours = compress_statistics(full, rank)
    _are_the_same(ours, expected)
    for of in (MAIN, HELD_OUT):
        found = [s.truncated_gram("first", of, bias=True) for s in (ours, expected)]
        dense = [kept.dense() for kept in found if kept is not None]
        torch.testing.assert_close(*dense, rtol=0, atol=1e-9 * float(dense[0].norm()))


def test_sketches_of_a_higher_rank(model: nn.Module, batches: list[Batch]) -> None:
    higher = collect(model, batches, RANK + 2)
    _are_the_same(compress_statistics(higher, RANK), collect(model, batches))
    with pytest.raises(matsmerge.StatisticsError, match=r"rank 16, which know nothing .* below 16"):
        compress_statistics(higher, RANK + 2)
    with pytest.raises(matsmerge.StatisticsError, match="sketch of rank 99 is smaller than"):
        compress_statistics(collect(model, batches, "full"), 99)


def test_they_add_up_with_collected_ones(
    model: nn.Module, batches: list[Batch], tmp_path: Path
) -> None:
    out = tmp_path / "s.safetensors"
    save_statistics(compress_statistics(collect(model, batches[:2], "full"), RANK), out, "float64")
    others = collect(model, batches[2:])
    added = combine_statistics([matsmerge.open_statistics(out), others])
    _are_the_same(added, combine_statistics([collect(model, batches[:2]), others]))
