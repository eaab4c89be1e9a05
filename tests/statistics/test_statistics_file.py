"""Files that are damaged, foreign, or of another model are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import matsmerge
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.statistics.combining import combine
from matsmerge.statistics.statistics import check_belongs
from matsmerge.statistics.statistics_file import is_statistics_file, open_statistics

KEY = "matsmerge_statistics"


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.fixture
def file(tmp_path: Path, model: nn.Linear) -> Path:
    path = tmp_path / "s.safetensors"
    matsmerge.collect(model, [torch.randn(5, 3)], out=path)
    return path


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    with safe_open(path, "pt") as opened:
        header = json.loads(opened.metadata()[KEY])
    change(header)
    save_file(load_file(path), path, metadata={KEY: json.dumps(header)})


def test_it_is_told_from_a_model(file: Path, tmp_path: Path) -> None:
    assert is_statistics_file(file)
    save_file({"w": torch.ones(1)}, tmp_path / "m.safetensors")
    assert not is_statistics_file(tmp_path / "m.safetensors")
    with pytest.raises(matsmerge.StatisticsError, match="holds no statistics"):
        open_statistics(tmp_path / "m.safetensors")
    with pytest.raises(matsmerge.StatisticsError, match="no such file"):
        open_statistics(tmp_path / "x.safetensors")


@pytest.mark.parametrize("num_bytes", [0, 4, 100, -1])
def test_cut_short(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(matsmerge.CheckpointError, match="truncated"):
        open_statistics(file)


def test_a_newer_format(file: Path) -> None:
    edit(file, lambda header: header.update(format_version=2, something="new"))
    with pytest.raises(matsmerge.StatisticsError, match="format 2 by a newer matsmerge.*upgrade"):
        open_statistics(file)


def test_damaged_headers(file: Path) -> None:
    content = file.read_bytes()
    for change in (
        lambda header: header.pop("format_version"),
        lambda header: header.update(sets=3),
        lambda header: header.update(surprise=1),
        lambda header: header["forms"].update({"main/fisher/x": "full"}),
    ):
        file.write_bytes(content)
        edit(file, change)
        with pytest.raises(matsmerge.StatisticsError, match=r"damaged"):
            open_statistics(file)


def test_another_model_is_refused(file: Path, model: nn.Linear, tmp_path: Path) -> None:
    statistics = open_statistics(file)
    check_belongs(statistics, InMemoryCheckpoint("same", model))
    other = nn.Linear(3, 2)
    with pytest.raises(matsmerge.StatisticsError, match="collected from another model.*--force"):
        check_belongs(statistics, InMemoryCheckpoint("other", other))
    foreign = matsmerge.collect(other, [torch.randn(5, 3)])
    with pytest.raises(matsmerge.StatisticsError, match="different models.*--force"):
        combine([statistics, foreign])
    assert combine([statistics, foreign], force=True).header.num_examples == 10
    differently = matsmerge.collect(model, [torch.randn(5, 3)], bias=False)
    with pytest.raises(matsmerge.StatisticsError, match="bias is True and False"):
        combine([statistics, differently], force=True)


def test_what_does_not_add_up_is_refused(file: Path, tmp_path: Path) -> None:
    other = matsmerge.collect(nn.Linear(4, 2), [torch.randn(5, 4)])
    with pytest.raises(matsmerge.StatisticsError, match="different shapes"):
        combine([open_statistics(file), other], force=True)


def test_float16_is_too_narrow(model: nn.Linear, tmp_path: Path) -> None:
    with pytest.raises(matsmerge.RecipeError, match="found 'float16'.*too large"):
        matsmerge.collect(
            model, [torch.randn(5, 3)], out=tmp_path / "s.safetensors", dtype="float16"
        )
    with pytest.raises(matsmerge.OutputError, match=r"\.safetensors"):
        matsmerge.collect(model, [torch.randn(5, 3)], out=tmp_path / "s.pt")
