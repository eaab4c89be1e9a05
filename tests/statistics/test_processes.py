"""Two processes give the file that one gives."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from forked_commands import ForkedCommand, run_mats
from tiny_models import bert_config, make_tokenizer, save, write_rows
from transformers import BertForSequenceClassification

from matsmerge.statistics import partial_file
from matsmerge.statistics.statistics_file import open_statistics


def be_one_of_two(rank: int, port: int, *, dies: bool) -> Callable[[], None]:
    """What torchrun tells its processes; the second one may be killed when it has saved."""

    def prepare() -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        partial_file._SECONDS_BETWEEN = -1.0
        keep = partial_file.PartialFile.save

        def save_and_die(self: partial_file.PartialFile, collection: object) -> None:
            keep(self, collection)  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGKILL)

        if dies and rank == 1:
            partial_file.PartialFile.save = save_and_die  # type: ignore[method-assign]

    return prepare


def test_two_processes_are_as_one(tmp_path: Path) -> None:
    model = BertForSequenceClassification(bert_config(num_labels=2)).double()
    folder = save(model, tmp_path / "model", make_tokenizer())
    rows = [{"text": " ".join("abcdef"[: 1 + i % 6]), "label": i % 2} for i in range(13)]
    write_rows(tmp_path / "data.jsonl", rows)
    common = [
        "collect", str(folder), "--data", str(tmp_path / "data.jsonl"), "--dtype", "float64",
        "--statistics", "gram,kfac,fisher,block_fisher", "--batch-size", "3", "--held-out", "0.3",
    ]  # fmt: skip
    files = [tmp_path / f"{i}.safetensors" for i in range(3)]
    alone = run_mats(*common, "--out", files[0])
    assert alone.returncode == 0, alone.stderr
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "matsmerge"]
    done = subprocess.run(
        [sys.executable, *launcher, *common, "--out", str(files[1])],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    one, two = map(open_statistics, files[:2])
    assert one.header == two.header
    assert one.header.num_examples == 13
    for full_key in one.header.forms:
        of, _, key = full_key.partition("/")
        torch.testing.assert_close(one.array(key, of), two.array(key, of), rtol=1e-9, atol=1e-15)
    assert sorted(p.name for p in tmp_path.glob(".*")) == []
    # One of two is killed, and the launcher ends the other; they go on from what each had saved.
    for dies in (True, False):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        first, second = (
            ForkedCommand(
                [*common, "--out", files[2], "--resume"], be_one_of_two(rank, port, dies=dies)
            )
            for rank in range(2)
        )
        ended = second.wait()
        assert ended.returncode == (-signal.SIGKILL if dies else 0), ended.stderr
        if dies:
            first.send_signal(signal.SIGTERM)
        ended = first.wait()
        assert ended.returncode == (143 if dies else 0), ended.stderr
        left = {p.name for p in tmp_path.glob(".*")}
        assert (".2.safetensors.1of2.partial" in left) == dies
    assert files[2].read_bytes() == files[1].read_bytes()
    assert left == set()
