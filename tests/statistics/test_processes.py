"""Two processes give the file that one gives."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked_commands import ForkedCommand, run_mats
from tiny_models import bert_config, make_tokenizer, save, write_rows
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import BertForSequenceClassification

from matsmerge.cli import main
from matsmerge.cli.shared_options import Execution
from matsmerge.engine.executor import SerialExecutor
from matsmerge.statistics import partial_file
from matsmerge.statistics.statistics_file import open_statistics

Run = Callable[..., tuple[int, str, str]]


def launch() -> int:
    """Run a command in two processes, as torchrun does; these are forks."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        start_method="fork",
    )
    codes = elastic_launch(config, main.run)(sys.argv[1:])
    return int(max(codes.values()))


def die_when_it_has_saved() -> None:
    """The second of two processes is killed, with a file to go on from."""
    partial_file._SECONDS_BETWEEN = -1.0
    keep = partial_file.PartialFile.save

    def save_and_die(self: partial_file.PartialFile, collection: object) -> None:
        keep(self, collection)  # type: ignore[arg-type]
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    partial_file.PartialFile.save = save_and_die  # type: ignore[method-assign]


@pytest.mark.long
def test_two_processes_or_parts_are_as_one(
    tmp_path: Path, mats: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BertForSequenceClassification(bert_config(num_labels=2)).double()
    folder = save(model, tmp_path / "model", make_tokenizer())
    rows = [{"text": " ".join("abcdef"[: 1 + i % 6]), "label": i % 2} for i in range(13)]
    write_rows(tmp_path / "data.jsonl", rows)
    common: list[str | Path] = [
        "collect", str(folder), "--data", str(tmp_path / "data.jsonl"), "--dtype", "float64",
        "--statistics", "gram,kfac,fisher,block_fisher", "--batch-size", "3", "--held-out", "0.3",
    ]  # fmt: skip
    files = [tmp_path / f"{i}.safetensors" for i in range(3)]
    alone = run_mats(*common, "--out", files[0])
    assert alone.returncode == 0, alone.stderr
    done = ForkedCommand([*common, "--out", files[1]], program=launch).wait()
    assert done.returncode == 0, done.stderr
    one, two = map(open_statistics, files[:2])
    assert one.header == two.header
    assert one.header.num_examples == 13
    for full_key in one.header.forms:
        of, _, key = full_key.partition("/")
        torch.testing.assert_close(one.array(key, of), two.array(key, of), rtol=1e-9, atol=1e-15)
    assert sorted(p.name for p in tmp_path.glob(".*")) == []
    # One of two is killed, which ends both; they go on from what each had saved.
    again = [*common, "--out", files[2], "--resume"]
    assert ForkedCommand(again, die_when_it_has_saved, launch).wait().returncode != 0
    assert ".2.safetensors.1of2.partial" in {p.name for p in tmp_path.glob(".*")}
    done = ForkedCommand(again, program=launch).wait()
    assert done.returncode == 0, done.stderr
    assert files[2].read_bytes() == files[1].read_bytes()
    assert not list(tmp_path.glob(".*"))
    # Jobs of an executor are added up as processes are.
    monkeypatch.setattr(Execution, "on_ray", lambda _: SerialExecutor())
    out = tmp_path / "3.safetensors"
    code, _, error = mats(*common, "--parts", "2", "--out", out)
    assert code == 0, error
    assert out.read_bytes() == files[1].read_bytes()
    assert sorted(p.name for p in tmp_path.glob(".*")) == []
