"""Files that are damaged, foreign, or of another model are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_json import MISSING, edit_metadata, put
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import matsmerge
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.statistics.statistics import check_belongs
from matsmerge.statistics.statistics_file import is_statistics_file, open_statistics
from matsmerge.statistics.statistics_sum import combine_statistics

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


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    edit_metadata(path, KEY, change)


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
    edit(file, lambda header: header | {"format_version": 3, "something": "new"})
    with pytest.raises(matsmerge.StatisticsError, match="format 3 by a newer matsmerge.*upgrade"):
        open_statistics(file)


# What is put into a header in place of what is there, by a path of keys.
WRONG: list[tuple[str, object]] = [
    ("", 5),
    ("", []),
    ("", None),
    ("format_version", MISSING),
    ("format_version", "1"),
    ("format_version", float("nan")),
    ("format_version", -1),
    ("model", "name"),
    ("model.name", 5),
    ("data", {}),
    ("options.statistics", ["grams"]),
    ("options.held_out", float("nan")),
    ("options.num_samples", -1),
    ("maps", [1]),
    ("maps.0.layout", "dense"),
    ("maps.0.inputs", "nowhere"),
    ("maps.0.outputs", "yes"),
    ("maps.0.outputs", True),
    ("sets", 3),
    ("sets", {}),
    ("sets.main", MISSING),
    ("sets.main.num_examples", -5),
    ("sets.main.num_examples", 0),
    ("sets.main.num_examples", 5.5),
    ("sets.main.num_examples", "5"),
    ("sets.main.num_examples", True),
    ("sets.main.num_examples", None),
    ("sets.main.num_examples", float("nan")),
    ("sets.main.num_examples", float("inf")),
    ("sets.main.num_examples", 10**300),
    ("sets.main.num_rows", [5]),
    ("sets.main.num_rows", {}),
    ("sets.main.num_rows", {"inputs/": -1}),
    ("forms", {"main/fisher/x": "full"}),
    ("forms", {"main": "full"}),
    ("forms", {"other/inputs/": "symmetric"}),
    ("forms", {"main/inputs/": "rows"}),
    ("forms", {"main/inputs/": "diagonals"}),
    ("forms", {"main/mean/": "symmetric"}),
    ("aliases", [1]),
    ("options", {"statistics": [["gram"]]}),
    ("without", {"gram": 5}),
    ("surprise", 1),
]


@pytest.mark.parametrize(("where", "wrong"), WRONG)
def test_damaged_headers(file: Path, where: str, wrong: object) -> None:
    edit(file, lambda header: put(header, where, wrong))
    with pytest.raises(matsmerge.StatisticsError, match=r"s\.safetensors: .*damaged"):
        open_statistics(file)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "9" * 6000, "NaN", "\x00", "[" + "1," * 2_500_000]
)
def test_headers_that_are_not_json(file: Path, text: str) -> None:
    save_file(load_file(file), file, metadata={KEY: text})
    with pytest.raises(matsmerge.StatisticsError, match="damaged header"):
        open_statistics(file)


def test_arrays_of_another_shape(file: Path) -> None:
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    arrays = load_file(file)
    for wrong in (torch.ones(5), torch.ones(6, dtype=torch.int32), torch.ones(())):
        save_file(arrays | {"main/inputs/": wrong}, file, metadata=metadata)
        with pytest.raises(
            matsmerge.StatisticsError, match="main/inputs/.*form .symmetric. that it should"
        ):
            open_statistics(file)


def test_another_model_is_refused(file: Path, model: nn.Linear, tmp_path: Path) -> None:
    statistics = open_statistics(file)
    check_belongs(statistics, InMemoryCheckpoint("same", model))
    other = nn.Linear(3, 2)
    with pytest.raises(matsmerge.StatisticsError, match="collected from another model.*--force"):
        check_belongs(statistics, InMemoryCheckpoint("other", other))
    foreign = matsmerge.collect(other, [torch.randn(5, 3)])
    with pytest.raises(matsmerge.StatisticsError, match="different models.*--force"):
        combine_statistics([statistics, foreign])
    assert combine_statistics([statistics, foreign], force=True).header.num_examples == 10
    differently = matsmerge.collect(model, [torch.randn(5, 3)], bias=False)
    with pytest.raises(matsmerge.StatisticsError, match="bias is True and False"):
        combine_statistics([statistics, differently], force=True)


def test_what_does_not_add_up_is_refused(file: Path, tmp_path: Path) -> None:
    other = matsmerge.collect(nn.Linear(4, 2), [torch.randn(5, 4)])
    with pytest.raises(matsmerge.StatisticsError, match="different shapes"):
        combine_statistics([open_statistics(file), other], force=True)


def test_float16_is_too_narrow(model: nn.Linear, tmp_path: Path) -> None:
    with pytest.raises(matsmerge.RecipeError, match="found 'float16'.*too large"):
        matsmerge.collect(
            model, [torch.randn(5, 3)], out=tmp_path / "s.safetensors", dtype="float16"
        )
    with pytest.raises(matsmerge.OutputError, match=r"\.safetensors"):
        matsmerge.collect(model, [torch.randn(5, 3)], out=tmp_path / "s.pt")


def test_names_that_are_given_are_made_public(model: nn.Linear, tmp_path: Path) -> None:
    name = f"{tmp_path}/data"
    header = matsmerge.collect(model, [torch.randn(5, 3)], name=name, data=name).header
    assert (header.model.name, header.data[0].name) == ("data", "data")
