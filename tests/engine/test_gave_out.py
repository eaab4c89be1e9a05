"""Memory, processes and files that give out: exit 1, what to do, and nothing lost."""

import errno
import os
import resource
import sys
from collections.abc import Callable
from multiprocessing import queues
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_commands import run_mats
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


@pytest.mark.parametrize(
    ("place", "error"),
    [
        *(("worker", error) for error in ERRORS),
        *((place, error) for place in ("measuring", "manifest") for error in ERRORS[:2]),
    ],
)
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


def limit_memory() -> None:
    merge = worker.Worker.merge

    def hungry(self: Any, job: Any, **keywords: Any) -> Any:
        num_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes + 300_000_000,) * 2)
        torch.empty(2**31)
        return merge(self, job, **keywords)

    worker.Worker.merge = hungry  # type: ignore[assignment,method-assign]


def limit_processes() -> None:
    """The second worker cannot be started; the first one must not keep anybody waiting."""
    fork, num_forks = os.fork, [0]

    def limited() -> int:
        num_forks[0] += 1
        if num_forks[0] > 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    os.fork = limited


def limit_threads() -> None:
    """The thread that hands jobs to processes dies, as it does without memory for another."""
    start = fail(RuntimeError("can't start new thread"))
    queues.Queue._start_thread = start  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
@pytest.mark.parametrize("limit", [limit_memory, limit_processes, limit_threads])
def test_limits_of_the_system(
    models: list[Path], tmp_path: Path, limit: Callable[[], None]
) -> None:
    out = tmp_path / "out"
    result = run_mats(*arguments(models, out), prepare=limit)
    assert result.returncode == 1, result.stderr
    assert "gave out" in result.stderr
    assert "--resume" in result.stderr
    assert not out.exists()
    matsmerge.merge(models, out=out, overwrite=True)
