"""What merging along the merged model costs: passes through linear layers, memory and files."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from prefix_families import Family, family, merge
from tiny_models import write_rows
from torch import Tensor, nn

from matsmerge.data.rows import read_data
from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task import encode_all

BATCH = 4


# Of one length, so that more of them is more of the same.
ROW = {"text": "a b c d e", "input": "a b c d e", "target": "a b"}


def count_products(
    members: Family, num: int, monkeypatch: pytest.MonkeyPatch, method: str
) -> tuple[float, float]:
    """Products of linear layers: of a merge with so many examples, and of plain passes over them."""
    plain, num_products = nn.Linear.forward, 0

    def counted(self: nn.Linear, x: Tensor) -> Tensor:
        nonlocal num_products
        num_products += x[..., 0].numel() * self.weight.numel()
        return plain(self, x)

    files = [members.folder / f"more{i}.jsonl" for i in range(2)]
    for file in files:
        write_rows(file, [ROW] * num)
    monkeypatch.setattr(nn.Linear, "forward", counted)
    merge(
        members.paths,
        method=method,
        init="average",
        data=[{"path": file, "batch_size": BATCH} for file in files],
    )
    of_merge, num_products = num_products, 0
    for path, file in zip(members.paths, files, strict=True):
        loaded = load_model(path, need_targets=False)
        examples = encode_all(loaded.task, read_data(file))
        with torch.no_grad():
            for at in range(0, num, BATCH):
                loaded.model(**loaded.task.collate(examples[at : at + BATCH]).inputs)
    monkeypatch.undo()
    return of_merge, num_products


@pytest.mark.parametrize(
    ("name", "method", "num_passes"),
    [("bert", "featcal", 2), ("bert", "mats_cross", 3), ("llama", "featcal", 2),
     ("t5", "featcal", 3), pytest.param("t5", "mats_cross", 3, marks=pytest.mark.long)],
)  # fmt: skip
def test_an_example_takes_one_pass_of_its_model_and_one_of_the_merged_one(
    name: str, method: str, num_passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one for K-FAC's factors, for embeddings that are the output layer as well, or for both.

    Trying out a few examples costs the same however many follow.
    """
    members = family(name, tmp_path, torch.float32)
    few, of_few = count_products(members, 2 * BATCH, monkeypatch, method)
    many, of_many = count_products(members, 6 * BATCH, monkeypatch, method)
    assert 0.6 * num_passes < (many - few) / (of_many - of_few) <= num_passes


@pytest.mark.parametrize("name", ["llama", pytest.param("resnet", marks=pytest.mark.long)])
def test_what_does_not_fit_into_memory_is_in_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes come out, and nothing is left behind."""
    members = family(name, tmp_path)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    made: list[Any] = []
    plain = tempfile.TemporaryFile

    def noted(*args: Any, **options: Any) -> Any:
        made.append(plain(*args, **options))
        return made[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", noted)
    expected = members.merge("featcal", init="average")
    assert not made
    found = members.merge("featcal", init="average", executor=LocalExecutor(1, max_bytes=1))
    assert made
    assert not list((tmp_path / "scratch").iterdir())
    for key, values in expected.items():
        assert torch.equal(found[key], values), key
