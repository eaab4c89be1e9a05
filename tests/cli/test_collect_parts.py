"""`mats collect --parts`: jobs that each collect from a part of the data."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import bert_config, make_tokenizer, save, write_rows
from transformers import BertForSequenceClassification

from matsmerge.cli.shared_options import Execution
from matsmerge.engine.executor import SerialExecutor
from matsmerge.statistics.statistics import Statistics
from matsmerge.statistics.statistics_file import open_statistics

Run = Callable[..., tuple[int, str, str]]


class Interrupted(SerialExecutor):
    """Gets Ctrl-C after so many jobs."""

    def __init__(self, num_jobs: int) -> None:
        super().__init__()
        self.num_jobs = num_jobs

    def map(self, function: Any, jobs: Iterable[Any]) -> Iterator[Any]:
        for i, job in enumerate(jobs):
            if i == self.num_jobs:
                raise KeyboardInterrupt
            yield function(job)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Five batches of a model's data."""
    model = BertForSequenceClassification(bert_config(num_labels=2)).double()
    folder = save(model, tmp_path / "model", make_tokenizer())
    rows = [{"text": " ".join("abcdef"[: 1 + i % 6]), "label": i % 2} for i in range(13)]
    write_rows(tmp_path / "data.jsonl", rows)
    data = ["--data", str(tmp_path / "data.jsonl"), "--batch-size", "3", "--dtype", "float64"]
    return ["collect", str(folder), *data, "--statistics", "gram,kfac,fisher,block_fisher"]


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*"))


def sketched(statistics: Statistics, key: str, of: str) -> torch.Tensor:
    """What a sketch is of, and the diagonal: directions have no sign."""
    kept = statistics.stored(key, of)
    return torch.cat([kept[:, :-1] @ kept[:, :-1].mT, kept[:, -1:]], 1)


@pytest.mark.parametrize("more", [(), ("--rank", "4"), ("--rank", "4", "--max-memory", "LIMIT")])
@pytest.mark.parametrize("num_parts", [2, 7])
def test_parts_are_as_the_whole(
    num_parts: int,
    more: tuple[str, ...],
    arguments: list[str],
    tmp_path: Path,
    mats: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also more of them than there are batches."""
    files = [tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"]
    alone = more[:2] if more[:1] == ("--rank",) else ()
    assert mats(*arguments, *alone, "--out", files[0])[0] == 0
    monkeypatch.setattr(Execution, "on_ray", lambda _: SerialExecutor())
    if more[-1:] == ("LIMIT",):  # less than it takes, so that it is done block by block
        said = mats(*arguments, *alone, "--out", files[1], "--dry-run", "--json")[1]
        more = (*more[:-1], str(json.loads(said)["memory_bytes_whole"] - 1))
    code, _, error = mats(*arguments, *more, "--out", files[1], "--parts", str(num_parts))
    assert code == 0, error
    one, other = map(open_statistics, files)
    assert one.header == other.header
    for full_key, form in one.header.forms.items():
        of, _, key = full_key.partition("/")
        # Gradients of single examples are stored in another order, on which no array depends.
        read = sketched if form == "sketch" else Statistics.array
        torch.testing.assert_close(read(one, key, of), read(other, key, of), rtol=1e-9, atol=1e-9)
    assert hidden(tmp_path) == []


def test_parts_that_are_done_are_not_done_again(
    arguments: list[str], tmp_path: Path, mats: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Execution, "on_ray", lambda _: SerialExecutor())
    out, expected = tmp_path / "out.safetensors", tmp_path / "expected.safetensors"
    assert mats(*arguments, "--parts", "3", "--out", expected)[0] == 0
    monkeypatch.setattr(Execution, "on_ray", lambda _: Interrupted(2))
    assert mats(*arguments, "--parts", "3", "--out", out)[0] == 130
    assert not out.exists()
    left = [".out.0of3.safetensors", ".out.1of3.safetensors"]
    assert hidden(tmp_path) == left
    code, _, error = mats(*arguments, "--parts", "3", "--out", out)
    assert (code, "continue it with --resume" in error) == (1, True), error
    written = [(tmp_path / name).stat().st_mtime_ns for name in left]
    monkeypatch.setattr(Execution, "on_ray", lambda _: Interrupted(3))
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    assert mats(*arguments, "--parts", "3", "--out", out, "--resume")[0] == 0
    assert written == [(tmp_path / name).stat().st_mtime_ns for name in left]
    assert out.read_bytes() == expected.read_bytes()
    monkeypatch.setattr(Path, "unlink", unlink)
    # As if it had been killed before it could tidy up.
    assert mats(*arguments, "--parts", "3", "--out", out, "--resume")[0] == 0
    assert out.read_bytes() == expected.read_bytes()
    assert hidden(tmp_path) == []


def test_parts_that_cannot_be(
    arguments: list[str], tmp_path: Path, mats: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, error = mats(*arguments, "--parts", "2", "--out", tmp_path / "out.safetensors")
    assert (code, "--parts: is for --executor ray" in error) == (1, True), error
    monkeypatch.setattr(Execution, "on_ray", lambda _: SerialExecutor())
    monkeypatch.setenv("MATSMERGE_CACHE", str(tmp_path / "cache"))
    code, _, error = mats(*arguments, "--parts", "2", "--out", "memory://place/out.safetensors")
    assert (code, "write to a folder that all nodes see" in error) == (1, True), error
