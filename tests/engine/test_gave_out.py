"""Memory, processes and files that give out: exit 1, what to do, and nothing lost."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import matsmerge
from matsmerge import ResourceError
from matsmerge.cli import main
from matsmerge.engine import merge_run, output_folder, prepared_merge, worker
from matsmerge.errors import machine_gave_out
from matsmerge.files.whole_outputs import staging_path

State = dict[str, Tensor]
ERRORS = [
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("std::bad_alloc"),
    RuntimeError("can't start new thread"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    OSError(errno.EMFILE, "Too many open files"),
]


@pytest.fixture
def models(make_state: Callable[..., State], save_model: Callable[..., Path]) -> list[Path]:
    return [save_model(f"m{i}", make_state(i)) for i in range(2)]


def arguments(models: list[Path], out: Path) -> list[str]:
    return ["merge", *(f"--model={model}" for model in models), f"--out={out}", "--workers=2"]


def fail(error: Exception) -> Callable[..., Any]:
    def raise_it(*_: Any, **__: Any) -> Any:
        raise error

    return raise_it


def test_what_means_that_the_machine_gave_out() -> None:
    assert all(map(machine_gave_out, ERRORS))
    assert machine_gave_out(ImportError("libx.so: failed to map segment from shared object"))
    for error in (
        ValueError("out of memory"),
        RuntimeError("shapes do not fit"),
        OSError(errno.ENOSPC, "No space left on device"),
    ):
        assert not machine_gave_out(error)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", ["worker", "measuring", "manifest"])
def test_in_the_middle(
    models: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    place: str,
) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            *{
                "worker": (worker.Worker, "merge", fail(error)),
                "measuring": (merge_run, "measure", fail(error)),
                "manifest": (merge_run, "make_manifest", fail(error)),
            }[place]
        )
        assert main.run(arguments(models, out)) == 1
        printed = capsys.readouterr().err
        assert "Traceback" not in printed
        assert "--resume" in printed
        assert "--max-memory" in printed
        with pytest.raises(ResourceError, match="gave out"):
            matsmerge.merge(models, out=tmp_path / "other")
    assert not out.exists()
    assert main.run([*arguments(models, out), "--resume"]) == 0
    assert not staging_path(out).exists()


@pytest.mark.parametrize("error", ERRORS[:4])
def test_before_the_work(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_merge, "align", fail(error))
        assert main.run(arguments(models, tmp_path / "out")) == 1
    printed = capsys.readouterr().err
    assert "gave out" in printed
    assert "Traceback" not in printed
    torch.save({"a": torch.ones(1)}, tmp_path / "x.bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", fail(error))
        assert main.run(["inspect", str(tmp_path / "x.bin")]) == 1
    assert "gave out" in capsys.readouterr().err


def test_no_thread_to_wait_for_the_disk(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("can't start new thread")
    monkeypatch.setattr(output_folder, "_SYNC_JOBS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(output_folder.OutputFolder, "_start_sync", fail(error))
        with pytest.raises(ResourceError, match="start new thread.*--resume"):
            matsmerge.merge(models, out=tmp_path / "out")
    matsmerge.merge(models, out=tmp_path / "out", resume=True)


LIMITED = """
import resource, sys, torch
from matsmerge.cli import main
from matsmerge.engine import worker
from matsmerge.engine import merge_run
merge = worker.Worker.merge
def hungry(self, job, **keywords):
    num_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes + 300_000_000,) * 2)
    torch.empty(2**31)
    return merge(self, job, **keywords)
worker.Worker.merge = hungry
sys.exit(main.run(sys.argv[1:]))
"""

# The second worker cannot be started; the first one must not keep anybody waiting.
NO_PROCESS = """
import errno, os, sys
from matsmerge.cli import main
fork, num_forks = os.fork, 0
def limited():
    global num_forks
    num_forks += 1
    if num_forks > 1:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()
os.fork = limited
sys.exit(main.run(sys.argv[1:]))
"""

# The thread that hands jobs to processes dies, as it does without memory for another thread.
NO_THREAD = """
import sys
from multiprocessing import queues
from matsmerge.cli import main
def fail(self):
    raise RuntimeError("can't start new thread")
queues.Queue._start_thread = fail
sys.exit(main.run(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
@pytest.mark.parametrize("code", [LIMITED, NO_PROCESS, NO_THREAD])
def test_limits_of_the_system(models: list[Path], tmp_path: Path, code: str) -> None:
    out = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments(models, out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 1, result.stderr
    assert "gave out" in result.stderr
    assert "--resume" in result.stderr
    assert not out.exists()
    matsmerge.merge(models, out=out, overwrite=True)
