"""Two processes give the file that one gives."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import bert_config, make_tokenizer, save, write_rows
from transformers import BertForSequenceClassification

from matsmerge.cli.shared_options import Execution
from matsmerge.engine.executor import SerialExecutor
from matsmerge.statistics.statistics_file import open_statistics

Run = Callable[..., tuple[int, str, str]]

_KILLED = """
import os, signal
from matsmerge.cli.main import main
from matsmerge.statistics import partial_file
partial_file._SECONDS_BETWEEN = -1.0
save = partial_file.PartialFile.save
def save_and_die(self, collection):
    save(self, collection)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
partial_file.PartialFile.save = save_and_die
main()
"""


def test_two_processes_or_parts_are_as_one(
    tmp_path: Path, mats: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BertForSequenceClassification(bert_config(num_labels=2)).double()
    folder = save(model, tmp_path / "model", make_tokenizer())
    rows = [{"text": " ".join("abcdef"[: 1 + i % 6]), "label": i % 2} for i in range(13)]
    write_rows(tmp_path / "data.jsonl", rows)
    common = [
        "collect", str(folder), "--data", str(tmp_path / "data.jsonl"), "--dtype", "float64",
        "--statistics", "gram,kfac,fisher,block_fisher", "--batch-size", "3", "--held-out", "0.3",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    files = []
    launchers = (["-m"], ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"])
    for i, launcher in enumerate(launchers):
        files.append(tmp_path / f"{i}.safetensors")
        command = [sys.executable, *launcher, "matsmerge", *common, "--out", str(files[-1])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    one, two = map(open_statistics, files)
    assert one.header == two.header
    assert one.header.num_examples == 13
    for full_key in one.header.forms:
        of, _, key = full_key.partition("/")
        torch.testing.assert_close(one.array(key, of), two.array(key, of), rtol=1e-9, atol=1e-15)
    assert sorted(p.name for p in tmp_path.glob(".*")) == []
    # One of two is killed, which ends both; they go on from what each had saved.
    together = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    (tmp_path / "killed.py").write_text(_KILLED)
    out = tmp_path / "2.safetensors"
    for what in ([str(tmp_path / "killed.py")], ["-m", "matsmerge"]):
        command = [sys.executable, *together, *what, *common, "--out", str(out), "--resume"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == (what == ["-m", "matsmerge"]), done.stderr
        left = {p.name for p in tmp_path.glob(".*")}
        assert (".2.safetensors.1of2.partial" in left) == (done.returncode != 0)
    assert out.read_bytes() == files[1].read_bytes()
    assert left == set()
    # Jobs of an executor are added up as processes are.
    monkeypatch.setattr(Execution, "on_ray", lambda _: SerialExecutor())
    out = tmp_path / "3.safetensors"
    code, _, error = mats(*common, "--parts", "2", "--out", out)
    assert code == 0, error
    assert out.read_bytes() == files[1].read_bytes()
    assert sorted(p.name for p in tmp_path.glob(".*")) == []
